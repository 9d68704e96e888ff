/* The driver API, as far as PyTorch, Triton and nvidia libraries ask for it: this library is also libcuda.so.1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "gpu.h"

const char *cudaGetErrorString(int status);
int cudaDeviceGetAttribute(int *value, int attribute, int ordinal);
int cudaGetDeviceProperties(device_properties *properties, int ordinal);
int cudaMemGetInfo(size_t *free_bytes, size_t *total);

static char primary_context[MAX_DEVICES]; /* addresses that stand for contexts */

/* ---- start, errors, devices */

API int cuInit(unsigned flags) { return vgpu_devices() ? SUCCESS : ERROR_NO_DEVICE; }

API int cuDriverGetVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return SUCCESS;
}

API int cuGetErrorString(int status, const char **text) {
  *text = cudaGetErrorString(status);
  return SUCCESS;
}

API int cuGetErrorName(int status, const char **text) {
  switch (status) {
    case SUCCESS: *text = "CUDA_SUCCESS"; break;
    case ERROR_OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case ERROR_LAUNCH_FAILURE: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case ERROR_NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *text = "CUDA_ERROR_UNKNOWN";
  }
  return SUCCESS;
}

API int cuDeviceGetCount(int *count) {
  *count = vgpu_devices();
  return SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal < vgpu_devices() ? SUCCESS : ERROR_INVALID_DEVICE;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}

API int cuDeviceGetUuid(char *uuid, int device) {
  device_properties properties;
  int status = cudaGetDeviceProperties(&properties, device);
  if (!status) memcpy(uuid, properties.uuid, sizeof properties.uuid);
  return status;
}

API int cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

API int cuDeviceGetName(char *text, int size, int device) {
  if (device >= vgpu_devices()) return ERROR_INVALID_DEVICE;
  snprintf(text, size, "%s", vgpu_device(device)->name);
  return SUCCESS;
}

API int cuDeviceTotalMem_v2(size_t *total, int device) {
  if (device >= vgpu_devices()) return ERROR_INVALID_DEVICE;
  *total = vgpu_device(device)->total;
  return SUCCESS;
}

/* A log of driver messages: there are none to call back about. */
API int cuLogsRegisterCallback(void *callback, void *argument, void **handle) {
  if (handle) *handle = 0;
  return SUCCESS;
}

API int cuLogsUnregisterCallback(void *handle) { return SUCCESS; }

/* ---- contexts: one a device, made at its first use */

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (device >= vgpu_devices()) return ERROR_INVALID_DEVICE;
  if (flags) *flags = 0;
  *active = vgpu_has_context(device);
  return SUCCESS;
}

API int cuDevicePrimaryCtxRetain(void **context, int device) {
  int previous = vgpu_current;
  vgpu_current = device;
  int status = vgpu_check_device();
  vgpu_current = previous;
  if (!status) *context = &primary_context[device];
  return status;
}

API int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }

API int cuCtxGetCurrent(void **context) {
  *context = vgpu_current < vgpu_devices() && vgpu_has_context(vgpu_current) ? &primary_context[vgpu_current] : 0;
  return SUCCESS;
}

API int cuCtxSetCurrent(void *context) {
  if (context) vgpu_current = (int)((char *)context - primary_context);
  return SUCCESS;
}

API int cuCtxPushCurrent(void *context) { return cuCtxSetCurrent(context); }
API int cuCtxPopCurrent(void **context) { return context ? cuCtxGetCurrent(context) : SUCCESS; }

API int cuCtxGetDevice(int *device) {
  *device = vgpu_current;
  return SUCCESS;
}

API int cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }

API int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return SUCCESS;
}

/* ---- streams */

API int cuStreamGetCtx(void *handle, void **context) {
  *context = &primary_context[vgpu_stream(handle)->device];
  return SUCCESS;
}

API int cuStreamIsCapturing(void *handle, int *status) {
  *status = vgpu_stream(handle)->capturing;
  return SUCCESS;
}

API int cuStreamWriteValue32(void *handle, unsigned *at, unsigned value, unsigned flags) {
  *at = value;
  return SUCCESS;
}

/* ---- memory */

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return cudaMemGetInfo(free_bytes, total); }
API int cuMemAlloc_v2(void **out, size_t size) { return vgpu_allocate(out, size, MEMORY_DEVICE); }
API int cuMemFree_v2(void *pointer) { return vgpu_free(pointer); }

API int cuMemsetD32Async(void *to, unsigned value, size_t count, void *handle) {
  return vgpu_fill(to, (int)(value & 255), count * 4); /* exact where all bytes are equal, as in every use seen */
}

API int cuMemGetAddressRange(void **base, size_t *size, void *pointer) {
  region found;
  if (!vgpu_find_region(pointer, &found)) return ERROR_INVALID_VALUE;
  if (base) *base = (void *)found.base;
  if (size) *size = found.size;
  return SUCCESS;
}

API int cuMemGetAddressRange_v2(void **base, size_t *size, void *pointer) {
  return cuMemGetAddressRange(base, size, pointer);
}

API int cuPointerGetAttribute(void *out, int attribute, const void *pointer) {
  region found;
  if (!vgpu_find_region(pointer, &found)) return ERROR_INVALID_VALUE;
  switch (attribute) {
    case 1: *(void **)out = &primary_context[found.device]; break;
    case 2: *(unsigned *)out = found.kind == MEMORY_HOST ? 1 : 2; break;
    case 3: case 4: *(const void **)out = pointer; break; /* device and host pointer */
    case 7: case 11: *(u64 *)out = found.base; break;     /* buffer id, start */
    case 9: *(int *)out = found.device; break;
    case 12: *(size_t *)out = found.size; break;
    default: *(int *)out = 0;
  }
  return SUCCESS;
}

API int cuPointerGetAttributes(unsigned count, const int *attributes, void **out, const void *pointer) {
  int status = SUCCESS;
  for (unsigned i = 0; i < count; i++) {
    if (cuPointerGetAttribute(out[i], attributes[i], pointer)) status = ERROR_INVALID_VALUE;
  }
  return status;
}

/* ---- entry points by name */

/* NVIDIA's private tables, which NVRTC asks for to see what hardware there is: without one it carries on. */
API int cuGetExportTable(const void **table, const void *id) {
  *table = 0;
  return ERROR_NOT_FOUND;
}

/* This library's own function of that name, or of its second version; NULL for what it has never heard of. */
static void *entry_point(const char *name) {
  static void *self;
  Dl_info info;
  char second[128];
  if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!self) return 0;
  snprintf(second, sizeof second, "%s_v2", name);
  void *function = dlsym(self, second);
  return function ? function : dlsym(self, name);
}

/* status: cudaDriverEntryPointQueryResult, 0 found, 1 no such symbol */
API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, u64 flags, int *status) {
  *function = entry_point(name);
  if (!*function) vgpu_unsupported(name, 0);
  if (status) *status = *function ? 0 : 1;
  return SUCCESS;
}

API int cudaGetDriverEntryPoint(const char *name, void **function, u64 flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, function, VGPU_CUDA_VERSION, flags, status);
}

API int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
  cudaGetDriverEntryPointByVersion(name, function, (unsigned)version, flags, status);
  return *function ? SUCCESS : ERROR_NOT_FOUND;
}

API int cuGetProcAddress(const char *name, void **function, int version, u64 flags) {
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
