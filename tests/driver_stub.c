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
CUresult cuMemcpy3DBatchAsync_v2(size_t, CUDA_MEMCPY3D_BATCH_OP *, unsigned long long, CUstream);
#endif

enum { MAX_RANGES = 64, MAX_RECORDS = 4096, CONTEXTS = 8 };

typedef struct {
    int generation; /* 12080 or 13000 for a batch, 0 for a single copy */
    size_t count, num_attrs, first; /* for boxes, no attributes, and the flags of the call */
    CUmemcpyAttributes attrs;
    CUstream stream;
    CUcontext context;
} Record;

/* `depth` layers of `height` rows of `width` bytes; steps are bytes from row to row, layer to layer. */
typedef struct {
    CUdeviceptr address;
    size_t row, layer;
} Side;

typedef struct {
    Side dst, src;
    size_t width, height, depth;
} Copy;

typedef struct {
    CUdeviceptr low, high;
} Range;

static int version = 13000, capturing, max_pitch;
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
    max_pitch = 0x7FFFFFFF;
    fail_at = SIZE_MAX;
    num_records = num_copies = num_pending = num_ranges = num_contexts = 0;
}

void stub_fail_at(size_t copy) { fail_at = copy; }
void stub_capture(int active) { capturing = active; }
void stub_max_pitch(int nbytes) { max_pitch = nbytes; }
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

void stub_box_sizes(size_t *out) {
    const size_t sizes[] = {
        sizeof(CUDA_MEMCPY3D_BATCH_OP),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, src),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, dst),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, extent.width),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, extent.height),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, extent.depth),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, srcAccessOrder),
        offsetof(CUDA_MEMCPY3D_BATCH_OP, flags),
        sizeof(CUmemcpy3DOperand),
        offsetof(CUmemcpy3DOperand, type),
        offsetof(CUmemcpy3DOperand, op.ptr.ptr),
        offsetof(CUmemcpy3DOperand, op.ptr.rowLength),
        offsetof(CUmemcpy3DOperand, op.ptr.layerHeight),
        offsetof(CUmemcpy3DOperand, op.ptr.locHint),
        CU_MEMCPY_OPERAND_TYPE_POINTER,
    };
    memcpy(out, sizes, sizeof sizes);
}

void stub_box_alone_sizes(size_t *out) {
    const size_t sizes[] = {
        sizeof(CUDA_MEMCPY3D),
        offsetof(CUDA_MEMCPY3D, srcXInBytes),
        offsetof(CUDA_MEMCPY3D, dstXInBytes),
        offsetof(CUDA_MEMCPY3D, WidthInBytes),
        offsetof(CUDA_MEMCPY3D, Height),
        offsetof(CUDA_MEMCPY3D, Depth),
        offsetof(CUDA_MEMCPY3D, srcMemoryType),
        offsetof(CUDA_MEMCPY3D, srcDevice),
        offsetof(CUDA_MEMCPY3D, srcPitch),
        offsetof(CUDA_MEMCPY3D, srcHeight),
        CU_MEMORYTYPE_UNIFIED,
        CU_DEVICE_ATTRIBUTE_MAX_PITCH,
    };
    memcpy(out, sizes, sizeof sizes);
}

size_t stub_num_pending(void) { return num_pending; }

void stub_pending(size_t i, size_t *out) {
    const Copy *c = &pending[i];
    const size_t fields[] = {
        c->src.address, c->src.row, c->src.layer, c->dst.address, c->dst.row, c->dst.layer,
        c->width,       c->height,  c->depth,
    };
    memcpy(out, fields, sizeof fields);
}

void stub_run(void) {
    for (size_t i = 0; i < num_pending; i++) {
        const Copy *c = &pending[i];
        for (size_t z = 0; z < c->depth; z++)
            for (size_t y = 0; y < c->height; y++)
                memcpy((void *)(c->dst.address + z * c->dst.layer + y * c->dst.row),
                       (const void *)(c->src.address + z * c->src.layer + y * c->src.row),
                       c->width);
    }
    num_pending = 0;
}

/* ---- the driver ---- */

/* A copy may lie inside one registration or outside all, never across a border. */
static int crosses(const Side *side, const Copy *c) {
    const CUdeviceptr low = side->address;
    const CUdeviceptr high =
        low + (c->depth - 1) * side->layer + (c->height - 1) * side->row + c->width;
    for (size_t i = 0; i < num_ranges; i++) {
        const int meets = low < ranges[i].high && high > ranges[i].low;
        if (meets && (low < ranges[i].low || high > ranges[i].high)) return 1;
    }
    return 0;
}

static CUresult queue(Copy copy) {
    if (num_copies++ == fail_at || crosses(&copy.dst, &copy) || crosses(&copy.src, &copy))
        return CUDA_ERROR_INVALID_VALUE;
    Copy *grown = realloc(pending, (num_pending + 1) * sizeof *grown);
    if (!grown) return CUDA_ERROR_OUT_OF_MEMORY;
    pending = grown;
    pending[num_pending++] = copy;
    return CUDA_SUCCESS;
}

static Copy line(CUdeviceptr dst, CUdeviceptr src, size_t nbytes) {
    return (Copy){{dst, nbytes, nbytes}, {src, nbytes, nbytes}, nbytes, 1, 1};
}

/* A row length or a layer height of 0 means that nothing lies between. */
static int side_of(Side *side, CUdeviceptr address, size_t row, size_t height, const Copy *c) {
    row = row ? row : c->width;
    height = height ? height : c->height;
    *side = (Side){address, row, row * height};
    return row >= c->width && row <= (size_t)max_pitch && height >= c->height;
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
        result = queue(line(dsts[i], srcs[i], sizes[i]));
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
    return result == CUDA_SUCCESS ? queue(line(dst, src, nbytes)) : result;
}

static int read_box(const CUDA_MEMCPY3D_BATCH_OP *op, Copy *c) {
    *c = (Copy){.width = op->extent.width, .height = op->extent.height, .depth = op->extent.depth};
    const int order = op->srcAccessOrder;
    return op->src.type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
           op->dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER && c->width && c->height && c->depth &&
           order >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY &&
           side_of(&c->src, op->src.op.ptr.ptr, op->src.op.ptr.rowLength,
                   op->src.op.ptr.layerHeight, c) &&
           side_of(&c->dst, op->dst.op.ptr.ptr, op->dst.op.ptr.rowLength,
                   op->dst.op.ptr.layerHeight, c);
}

static CUresult box_batch(int generation, size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed,
                          unsigned long long flags, CUstream stream) {
    *failed = SIZE_MAX;
    if (!count || flags || !stream || stream == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    if (capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    const CUmemcpyAttributes first = {ops[0].srcAccessOrder, ops[0].src.op.ptr.locHint,
                                      ops[0].dst.op.ptr.locHint, ops[0].flags};
    CUresult result = record((Record){generation, count, 0, flags, first, stream, NULL});
    for (size_t i = 0; result == CUDA_SUCCESS && i < count; i++) {
        Copy copy;
        result = read_box(&ops[i], &copy) ? queue(copy) : CUDA_ERROR_INVALID_VALUE;
        if (result != CUDA_SUCCESS) *failed = i;
    }
    return result;
}

CUresult cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops, size_t *failed,
                              unsigned long long flags, CUstream stream) {
    return box_batch(12080, count, ops, failed, flags, stream);
}

CUresult cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP *ops,
                                 unsigned long long flags, CUstream stream) {
    size_t failed;
    return box_batch(13000, count, ops, &failed, flags, stream);
}

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *box, CUstream stream) {
    const CUresult result = record((Record){.count = 1, .stream = stream});
    if (result != CUDA_SUCCESS) return result;
    Copy c = {.width = box->WidthInBytes, .height = box->Height, .depth = box->Depth};
    const int plain = !box->srcXInBytes && !box->srcY && !box->srcZ && !box->srcLOD &&
                      !box->dstXInBytes && !box->dstY && !box->dstZ && !box->dstLOD &&
                      !box->reserved0 && !box->reserved1 && c.width && c.height && c.depth &&
                      box->srcMemoryType == CU_MEMORYTYPE_UNIFIED &&
                      box->dstMemoryType == CU_MEMORYTYPE_UNIFIED;
    return plain && side_of(&c.src, box->srcDevice, box->srcPitch, box->srcHeight, &c) &&
                   side_of(&c.dst, box->dstDevice, box->dstPitch, box->dstHeight, &c)
               ? queue(c)
               : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version,
                             cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    (void)flags;
    if (cuda_version > version) return CUDA_ERROR_INVALID_VALUE;
    *function = NULL;
    if (!strcmp(symbol, "cuMemcpyBatchAsync") && cuda_version >= 12080)
        *function = cuda_version < 13000 ? (void *)cuMemcpyBatchAsync : (void *)cuMemcpyBatchAsync_v2;
    else if (!strcmp(symbol, "cuMemcpy3DBatchAsync") && cuda_version >= 12080)
        *function =
            cuda_version < 13000 ? (void *)cuMemcpy3DBatchAsync : (void *)cuMemcpy3DBatchAsync_v2;
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

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    if (attribute != CU_DEVICE_ATTRIBUTE_MAX_PITCH) return CUDA_ERROR_INVALID_VALUE;
    *out = max_pitch;
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
