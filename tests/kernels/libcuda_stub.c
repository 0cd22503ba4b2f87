/* In place of libcuda.so.1: a launch is handed to ``on_launch``, everything else succeeds and does nothing. */
#include <stdint.h>

int (*on_launch)(const void *config, void *function, void **params, void **extra);

int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
  return on_launch(config, function, params, extra);
}
int cuCtxGetCurrent(void **context) {
  *context = &on_launch;
  return 0;
}
int cuPointerGetAttribute(uint64_t *out, int attribute, uint64_t pointer) {
  *out = pointer;
  return 0;
}

/* What Triton's module is linked against and a launch does not call. */
#define UNUSED(name) int name(void) { return 0; }
UNUSED(cuCtxGetDevice) UNUSED(cuCtxGetLimit) UNUSED(cuCtxSetCurrent) UNUSED(cuCtxSetLimit) UNUSED(cuDeviceGet)
UNUSED(cuDeviceGetAttribute) UNUSED(cuDevicePrimaryCtxRetain) UNUSED(cuDriverGetVersion) UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute) UNUSED(cuFuncSetCacheConfig) UNUSED(cuGetErrorString) UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData) UNUSED(cuModuleUnload)
