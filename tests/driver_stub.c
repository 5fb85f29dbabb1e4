/* A stand-in for the CUDA driver, compiled against the real cuda.h, so that the compiler compares
 * every signature and struct below with NVIDIA's declarations. Copies wait until stub_run(), as on a
 * stream that is busy: what the driver must read during the call is read then, the bytes later. */

#define __CUDA_API_VERSION_INTERNAL /* declares both generations of a renamed function */
#include <cuda.h>

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if CUDA_VERSION < 13000
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                               size_t *, size_t, CUstream);
#endif

enum { MAX_RANGES = 64, MAX_RECORDS = 4096, CONTEXTS = 8 };

typedef struct {
    int generation; /* 12080 or 13000 for a batch, 0 for a single copy */
    size_t count, num_attrs, first;
    CUmemcpyAttributes attrs;
    CUstream stream;
    CUcontext context;
} Record;

typedef struct {
    CUdeviceptr dst, src;
    size_t nbytes;
} Copy;

typedef struct {
    CUdeviceptr low, high;
} Range;

static int version = 13000, capturing;
static size_t fail_at = SIZE_MAX; /* the copy, counted over all calls, that is refused */
static Record records[MAX_RECORDS];
static size_t num_records, num_copies, num_pending;
static Copy *pending;
static Range ranges[MAX_RANGES];
static size_t num_ranges;
static CUcontext contexts[CONTEXTS];
static size_t num_contexts;

/* ---- what the test says and asks ---- */

void stub_reset(int driver_version) {
    version = driver_version;
    capturing = 0;
    fail_at = SIZE_MAX;
    num_records = num_copies = num_pending = num_ranges = num_contexts = 0;
}

void stub_fail_at(size_t copy) { fail_at = copy; }
void stub_capture(int active) { capturing = active; }
size_t stub_num_records(void) { return num_records; }
size_t stub_context_depth(void) { return num_contexts; }

void stub_record(size_t i, long long *out) {
    const Record *r = &records[i];
    const CUmemcpyAttributes *a = &r->attrs;
    const long long fields[] = {
        r->generation,      (long long)r->count,   (long long)r->num_attrs, (long long)r->first,
        a->srcAccessOrder,  a->srcLocHint.type,    a->srcLocHint.id,        a->dstLocHint.type,
        a->dstLocHint.id,   a->flags,              (long long)r->stream,    (long long)r->context,
    };
    memcpy(out, fields, sizeof fields);
}

void stub_sizes(size_t *out) {
    const size_t sizes[] = {
        sizeof(CUmemcpyAttributes),
        offsetof(CUmemcpyAttributes, srcAccessOrder),
        offsetof(CUmemcpyAttributes, srcLocHint),
        offsetof(CUmemcpyAttributes, dstLocHint),
        offsetof(CUmemcpyAttributes, flags),
        sizeof(CUmemLocation),
        offsetof(CUmemLocation, type),
        offsetof(CUmemLocation, id),
        sizeof(CUdeviceptr),
        CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        (size_t)CU_STREAM_LEGACY,
        (size_t)CU_STREAM_PER_THREAD,
        CU_GET_PROC_ADDRESS_LEGACY_STREAM,
    };
    memcpy(out, sizes, sizeof sizes);
}

void stub_run(void) {
    for (size_t i = 0; i < num_pending; i++)
        memcpy((void *)pending[i].dst, (const void *)pending[i].src, pending[i].nbytes);
    num_pending = 0;
}

/* ---- the driver ---- */

/* A copy may lie inside one registration or outside all, never across a border. */
static int crosses(CUdeviceptr address, size_t nbytes) {
    for (size_t i = 0; i < num_ranges; i++) {
        const int meets = address < ranges[i].high && address + nbytes > ranges[i].low;
        if (meets && (address < ranges[i].low || address + nbytes > ranges[i].high)) return 1;
    }
    return 0;
}

static CUresult queue(CUdeviceptr dst, CUdeviceptr src, size_t nbytes) {
    if (num_copies++ == fail_at || crosses(dst, nbytes) || crosses(src, nbytes))
        return CUDA_ERROR_INVALID_VALUE;
    Copy *grown = realloc(pending, (num_pending + 1) * sizeof *grown);
    if (!grown) return CUDA_ERROR_OUT_OF_MEMORY;
    pending = grown;
    pending[num_pending++] = (Copy){dst, src, nbytes};
    return CUDA_SUCCESS;
}

static CUresult record(Record r) {
    if (!num_contexts) return CUDA_ERROR_INVALID_CONTEXT;
    if (num_records == MAX_RECORDS) return CUDA_ERROR_OUT_OF_MEMORY;
    r.context = contexts[num_contexts - 1];
    records[num_records++] = r;
    return CUDA_SUCCESS;
}

static CUresult batch(int generation, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes,
                      size_t count, CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs,
                      size_t *failed, CUstream stream) {
    *failed = SIZE_MAX;
    if (num_attrs < 1 || num_attrs > count || firsts[0] != 0) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < num_attrs; i++) {
        const int order = attrs[i].srcAccessOrder;
        if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
            return CUDA_ERROR_INVALID_VALUE;
        if (firsts[i] >= count || (i && firsts[i] <= firsts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
    }
    if (!stream || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult result =
        record((Record){generation, count, num_attrs, firsts[0], attrs[0], stream, NULL});
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        result = queue(dsts[i], srcs[i], sizes[i]);
        if (result != CUDA_SUCCESS) *failed = i;
    }
    return result;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs,
                            size_t *failed, CUstream stream) {
    return batch(12080, dsts, srcs, sizes, count, attrs, firsts, num_attrs, failed, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
                               CUmemcpyAttributes *attrs, size_t *firsts, size_t num_attrs,
                               CUstream stream) {
    size_t failed;
    return batch(13000, dsts, srcs, sizes, count, attrs, firsts, num_attrs, &failed, stream);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    const CUresult result = record((Record){.count = 1, .stream = stream});
    return result == CUDA_SUCCESS ? queue(dst, src, nbytes) : result;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version,
                             cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)flags;
    if (cuda_version > version) return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    if (!strcmp(symbol, "cuMemcpyBatchAsync") && cuda_version >= 13000)
        *function = (void *)cuMemcpyBatchAsync_v2;
    else if (!strcmp(symbol, "cuMemcpyBatchAsync") && cuda_version >= 12080)
        *function = (void *)cuMemcpyBatchAsync;
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *out) {
    *out = version;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
    case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        break;
    default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream;
    *status = capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(size_t)(0xC000 + device);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    if (num_contexts == CONTEXTS) return CUDA_ERROR_OUT_OF_MEMORY;
    contexts[num_contexts++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    if (!num_contexts) return CUDA_ERROR_INVALID_CONTEXT;
    *context = contexts[--num_contexts];
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void *address, size_t nbytes, unsigned int flags) {
    (void)flags;
    if (num_ranges == MAX_RANGES) return CUDA_ERROR_OUT_OF_MEMORY;
    ranges[num_ranges++] = (Range){(CUdeviceptr)address, (CUdeviceptr)address + nbytes};
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *address) {
    for (size_t i = 0; i < num_ranges; i++)
        if (ranges[i].low == (CUdeviceptr)address) {
            ranges[i] = ranges[--num_ranges];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
