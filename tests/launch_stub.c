/* A stand-in for libcuda.so.1 under Triton's launcher, compiled against the real cuda.h: a Hopper GPU
 * that takes kernels and never runs them. A cubin says itself where each parameter of a kernel lies
 * and how long it is, so a launch is read here as a driver reads it, and noted in LAUNCH_LOG, a line
 * of JSON each. What a driver refuses is refused. */

#include <cuda.h>

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_PARAMS = 128,
    MAX_FUNCTIONS = 64,
    SHARED_BYTES = 48 << 10, /* of a block that does not ask for more */
    MOST_SHARED_BYTES = 227 << 10,
};

typedef struct {
    char name[128];
    unsigned num_params, param_bytes[MAX_PARAMS];
    unsigned threads; /* of a block, as the kernel requires */
    int static_shared, max_dynamic_shared;
} Function;

static Function functions[MAX_FUNCTIONS];
static unsigned num_functions;
static CUcontext current;

static FILE *notes(void) {
    static FILE *file;
    if (!file) file = fopen(getenv("LAUNCH_LOG"), "a");
    if (!file) abort();
    return file;
}

/* ---- the kernel in a cubin ---- */

static const Elf64_Shdr *section(const char *image, const char *prefix, const char *name) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    for (unsigned i = 0; i < header->e_shnum; i++) {
        const char *found = names + sections[i].sh_name;
        if (!strncmp(found, prefix, strlen(prefix)) && !strcmp(found + strlen(prefix), name))
            return &sections[i];
    }
    return NULL;
}

/* `.nv.info.<kernel>`: attributes of a format byte, a key byte and 16 bits, which are the value or,
 * in format 4, the length of what follows. `cuobjdump -elf` prints them. */
static int read_attributes(Function *function, const char *at, size_t nbytes) {
    enum { SIZED = 0x04, PARAMETER = 0x17, REQUIRED_THREADS = 0x10 };
    const char *end = at + nbytes;
    while (at < end) {
        const unsigned char *head = (const unsigned char *)at;
        unsigned short length;
        memcpy(&length, at + 2, sizeof length);
        unsigned words[3] = {0};
        at += 4;
        if (head[0] != SIZED) continue;
        memcpy(words, at, length < sizeof words ? length : sizeof words);
        if (head[1] == PARAMETER) { /* index; ordinal and offset; flags, the size on top */
            const unsigned ordinal = words[1] & 0xFFFF;
            if (ordinal >= MAX_PARAMS) return 0;
            function->param_bytes[ordinal] = words[2] >> 18;
            if (ordinal >= function->num_params) function->num_params = ordinal + 1;
        }
        if (head[1] == REQUIRED_THREADS) function->threads = words[0] * words[1] * words[2];
        at += length;
    }
    return 1;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (memcmp(image, ELFMAG, SELFMAG)) return CUDA_ERROR_INVALID_IMAGE;
    *module = (CUmodule)image;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    const char *image = (const char *)module;
    const Elf64_Shdr *info = section(image, ".nv.info.", name);
    const Elf64_Shdr *shared = section(image, ".nv.shared.", name);
    if (!info) return CUDA_ERROR_NOT_FOUND;
    if (num_functions == MAX_FUNCTIONS) return CUDA_ERROR_OUT_OF_MEMORY;
    Function *function = &functions[num_functions++];
    snprintf(function->name, sizeof function->name, "%s", name);
    function->static_shared = shared ? (int)shared->sh_size : 0;
    function->max_dynamic_shared = SHARED_BYTES - function->static_shared;
    if (!read_attributes(function, image + info->sh_offset, info->sh_size))
        return CUDA_ERROR_INVALID_IMAGE;
    *out = (CUfunction)function;
    fprintf(notes(), "{\"loaded\": \"%s\"}\n", name);
    fflush(notes());
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
    const Function *function = (const Function *)handle;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)function->threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = function->static_shared; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break; /* nobody decides by them */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
    Function *function = (Function *)handle;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ||
        value > MOST_SHARED_BYTES - function->static_shared)
        return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
    (void)config;
    return handle ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- a launch ---- */

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **params,
                          void **extra) {
    const Function *function = (const Function *)handle;
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    if (!config->gridDimX || !config->gridDimY || !config->gridDimZ || extra ||
        config->blockDimX * config->blockDimY * config->blockDimZ != function->threads ||
        (int)config->sharedMemBytes > function->max_dynamic_shared)
        return CUDA_ERROR_INVALID_VALUE;
    FILE *out = notes();
    fprintf(out, "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ",
            function->name, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
            config->blockDimY, config->blockDimZ);
    fprintf(out, "\"shared\": %u, \"stream\": %zu, \"attributes\": %u, \"params\": [",
            config->sharedMemBytes, (size_t)config->hStream, config->numAttrs);
    for (unsigned i = 0; i < function->num_params; i++) {
        fprintf(out, i ? ", \"" : "\"");
        for (unsigned j = 0; j < function->param_bytes[i]; j++)
            fprintf(out, "%02x", ((unsigned char *)params[i])[j]);
        fprintf(out, "\"");
    }
    fprintf(out, "]}\n");
    fflush(out);
    return CUDA_SUCCESS;
}

/* The 16 words of a real tensor map are secret. These are the address, a word that Triton may change,
 * five sizes, four strides, the box in three words, the rank, and type and swizzle. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    const cuuint64_t element = 4; /* bytes: 32-bit integers are all that is taken */
    const cuuint64_t row_limit[] = {1024, 32, 64, 128}; /* bytes, by swizzle */
    (void)promotion;
    if (type != CU_TENSOR_MAP_DATA_TYPE_INT32 && type != CU_TENSOR_MAP_DATA_TYPE_UINT32)
        return CUDA_ERROR_NOT_SUPPORTED;
    if ((size_t)map % 64 || (size_t)address % 16 || !rank || rank > 5 || fill ||
        interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B ||
        box[0] * element % 16 || box[0] * element > row_limit[swizzle])
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
            return CUDA_ERROR_INVALID_VALUE;
    }
    memset(map, 0, sizeof *map);
    map->opaque[0] = (cuuint64_t)address;
    memcpy(&map->opaque[2], sizes, rank * sizeof *sizes);
    memcpy(&map->opaque[7], strides, (rank - 1) * sizeof *strides);
    memcpy(&map->opaque[11], box, rank * sizeof *box);
    map->opaque[14] = rank;
    map->opaque[15] = (cuuint64_t)type | (cuuint64_t)swizzle << 32;
    return CUDA_SUCCESS;
}

/* ---- the device ---- */

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = MOST_SHARED_BYTES; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 1; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* Unified addressing: memory that the GPU can reach has the same address there, and this one reaches
 * everything. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
    memcpy(value, &address, sizeof address);
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    static char buffer[32];
    snprintf(buffer, sizeof buffer, "refused with %d", (int)error);
    *text = buffer;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)functions;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

/* What the launcher's library links and no launch calls. */

CUresult cuCtxGetDevice(CUdevice *device) {
    (void)device;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)value, (void)limit;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)value, (void)limit;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    (void)stream, (void)status;
    return CUDA_ERROR_NOT_SUPPORTED;
}
