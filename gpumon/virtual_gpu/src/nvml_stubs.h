/* NVML functions that no source file defines answer NVML_ERROR_NOT_SUPPORTED, as a device without the feature does. */
#ifndef VGPU_NVML_STUBS_H
#define VGPU_NVML_STUBS_H

int vgpu_nvml_fault(const char *function);

#define VGPU_NVML_UNSUPPORTED(name) \
  __attribute__((visibility("default"), weak)) int name(void) { \
    int status = vgpu_nvml_fault(#name); \
    return status ? status : 3; \
  }

#endif
