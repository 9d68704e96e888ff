/* libnvidia-ml.so.1: the library itself, and the memory and identity of a device.
 *
 * Memory comes from the shared table; utilization, temperature and power are not supported unless they are invented.
 * Every other function nvidia-ml-py knows answers NVML_ERROR_NOT_SUPPORTED (generated).
 */
#include "nvml.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

shared_table *nvml_table;

static int initializations;

int nvml_text(char *out, unsigned size, const char *value) {
  if (strlen(value) >= size) return NVML_INSUFFICIENT_SIZE;
  strcpy(out, value);
  return NVML_SUCCESS;
}

/* ---- library */

API int nvmlInit_v2(void) {
  int status = vgpu_nvml_fault("nvmlInit_v2");
  if (status) return status;
  if (!nvml_table) nvml_table = table_open(setting("VGPU_SESSION", "default"), 0);
  initializations++;
  return nvml_table ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED;
}

API int nvmlInit(void) { return nvmlInit_v2(); }

API int nvmlInitWithFlags(unsigned flags) {
  int status = vgpu_nvml_fault("nvmlInitWithFlags");
  return status ? status : nvmlInit_v2();
}

API int nvmlShutdown(void) {
  int status = vgpu_nvml_fault("nvmlShutdown");
  if (status) return status;
  if (!initializations) return NVML_UNINITIALIZED;
  initializations--;
  return NVML_SUCCESS;
}

API const char *nvmlErrorString(int status) {
  switch (status) {
    case NVML_SUCCESS: return "Success";
    case NVML_UNINITIALIZED: return "Uninitialized";
    case NVML_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_NOT_SUPPORTED: return "Not Supported";
    case NVML_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_NOT_FOUND: return "Not Found";
    case NVML_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

API int nvmlSystemGetDriverVersion(char *out, unsigned size) {
  BEGIN(nvmlSystemGetDriverVersion);
  return nvml_text(out, size, "600.00.virtual");
}

API int nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  BEGIN(nvmlSystemGetNVMLVersion);
  return nvml_text(out, size, "13.600.00");
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  BEGIN(nvmlSystemGetCudaDriverVersion_v2);
  *version = VGPU_CUDA_VERSION;
  return NVML_SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

API int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
  BEGIN(nvmlSystemGetProcessName);
  char path[64], name[4096];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return NVML_NOT_FOUND;
  ssize_t length = read(file, name, sizeof name - 1);
  close(file);
  name[length > 0 ? length : 0] = 0;
  snprintf(out, size, "%s", name);
  return NVML_SUCCESS;
}

/* ---- memory */

static void memory_of(const target *of, uint64_t *total, uint64_t *used) {
  *used = 0;
  table_lock(nvml_table);
  table_reap(nvml_table);
  for (int i = 0; i < nvml_table->devices; i++) {
    if (nvml_belongs(of, i)) *used += table_used(nvml_table, i);
  }
  table_unlock(nvml_table);
  *total = of->device >= 0 ? nvml_info(of)->total : nvml_info(of)->board_total;
}

/* nvmlMemory_t: total, free, used */
API int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) {
  BEGIN_DEVICE(nvmlDeviceGetMemoryInfo, handle);
  uint64_t total, used;
  memory_of(&it, &total, &used);
  memory[0] = total;
  memory[1] = total > used ? total - used : 0;
  memory[2] = used;
  return NVML_SUCCESS;
}

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_v2;

API int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *memory) {
  BEGIN_DEVICE(nvmlDeviceGetMemoryInfo_v2, handle);
  uint64_t total, used;
  memory_of(&it, &total, &used);
  memory->total = total;
  memory->reserved = 0;
  memory->free = total > used ? total - used : 0;
  memory->used = used;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetBAR1MemoryInfo(void *handle, unsigned long long *memory) {
  BEGIN_DEVICE(nvmlDeviceGetBAR1MemoryInfo, handle);
  memory[0] = 128ull << 30;
  memory[2] = 2 * MIB;
  memory[1] = memory[0] - memory[2];
  return NVML_SUCCESS;
}

/* ---- identity */

typedef struct {
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
} pci_info;

API int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *pci) {
  BEGIN_DEVICE(nvmlDeviceGetPciInfo_v3, handle);
  unsigned bus = (unsigned)(it.board + 1) & 255;
  memset(pci, 0, sizeof *pci);
  snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", bus);
  snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", bus);
  pci->bus = bus;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetPciInfo_v2(void *handle, pci_info *pci) { return nvmlDeviceGetPciInfo_v3(handle, pci); }

API int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  BEGIN_DEVICE(nvmlDeviceGetCudaComputeCapability, handle);
  *major = nvml_info(&it)->major;
  *minor = nvml_info(&it)->minor;
  return NVML_SUCCESS;
}
