// A CUDA driver without a device: it accepts kernels, counts their launches, and computes nothing.
//
// triton's own launcher runs against it, so that the host's part of a launch can be timed on any machine. It answers as a
// GPU of compute capability 9.0 with 132 multiprocessors.

#include <stdlib.h>
#include <string.h>

#include "cuda.h"

long stub_launches = 0;
unsigned stub_grid[3];
unsigned stub_shared_bytes = 0;

static CUresult answered(int *to, int value) {
    *to = value;
    return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return answered(version, 13000); }
CUresult cuDeviceGetCount(int *count) { return answered(count, 1); }
CUresult cuDeviceGet(CUdevice *device, int index) { return answered(device, index); }
CUresult cuCtxGetDevice(CUdevice *device) { return answered(device, 0); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

#undef cuDevicePrimaryCtxRetain
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return answered(value, 9);
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return answered(value, 0);
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return answered(value, 132);
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return answered(value, 232448);
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return answered(value, 65536);
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return answered(value, 32);
        default: return answered(value, 49152);
    }
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    return answered(value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 32);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)1;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "an error of the stub";
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    stub_launches += 1;
    stub_grid[0] = config->gridDimX;
    stub_grid[1] = config->gridDimY;
    stub_grid[2] = config->gridDimZ;
    stub_shared_bytes = config->sharedMemBytes;
    return CUDA_SUCCESS;
}
