/* NVML's devices: boards by index, UUID and PCI address, and the MIG instances on them. */
#include <stdio.h>
#include <string.h>

#include "nvml.h"

static char board_handle[MAX_DEVICES], instance_handle[MAX_DEVICES]; /* their addresses are the handles */

/* ---- handles */

static int boards(void) {
  int count = 0;
  for (int i = 0; i < nvml_table->devices; i++) {
    if (nvml_table->device[i].gpu >= count) count = nvml_table->device[i].gpu + 1;
  }
  return count;
}

static int first_device(int board) {
  for (int i = 0; i < nvml_table->devices; i++) {
    if (nvml_table->device[i].gpu == board) return i;
  }
  return -1;
}

int nvml_belongs(const target *to, int device) {
  return to->device >= 0 ? device == to->device : nvml_table->device[device].gpu == to->board;
}

int nvml_target(void *handle, target *out) {
  long board = (char *)handle - board_handle, device = (char *)handle - instance_handle;
  if (board >= 0 && board < boards()) {
    int first = first_device((int)board);
    *out = (target){(int)board, nvml_table->device[first].instance ? -1 : first, 0};
  } else if (device >= 0 && device < nvml_table->devices) {
    *out = (target){nvml_table->device[device].gpu, (int)device, 1};
  } else {
    return NVML_INVALID_ARGUMENT;
  }
  return table_lost(nvml_table, out->device >= 0 ? out->device : first_device(out->board)) ? NVML_GPU_IS_LOST
                                                                                           : NVML_SUCCESS;
}

const device_info *nvml_info(const target *of) {
  return &nvml_table->device[of->device >= 0 ? of->device : first_device(of->board)];
}

static int is_split(const target *of) { return nvml_info(of)->instance != 0; }

/* ---- finding devices */

API int nvmlDeviceGetCount_v2(unsigned *count) {
  BEGIN(nvmlDeviceGetCount_v2);
  *count = (unsigned)boards();
  return NVML_SUCCESS;
}

API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  BEGIN(nvmlDeviceGetHandleByIndex_v2);
  if (index >= (unsigned)boards()) return NVML_INVALID_ARGUMENT;
  *handle = &board_handle[index];
  return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }

/* A board carries the number of its first device; a MIG instance its own, so that CUDA's and NVML's UUIDs agree. */
API int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
  BEGIN_DEVICE(nvmlDeviceGetUUID, handle);
  char uuid[64];
  unsigned number = it.device >= 0 ? (unsigned)it.device : (unsigned)(0x80 + it.board);
  snprintf(uuid, sizeof uuid, "%s-564700%02x-0000-0000-0000-000000000001", it.instance ? "MIG" : "GPU", number);
  return nvml_text(out, size, uuid);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  BEGIN(nvmlDeviceGetHandleByUUID);
  unsigned number;
  if (sscanf(uuid, "MIG-564700%2x", &number) == 1) {
    if (number >= (unsigned)nvml_table->devices || !nvml_table->device[number].instance) return NVML_NOT_FOUND;
    *handle = &instance_handle[number];
    return NVML_SUCCESS;
  }
  if (sscanf(uuid, "GPU-564700%2x", &number) != 1) return NVML_NOT_FOUND;
  if (number >= 0x80) number -= 0x80;
  else if (number < (unsigned)nvml_table->devices) number = (unsigned)nvml_table->device[number].gpu;
  if (number >= (unsigned)boards()) return NVML_NOT_FOUND;
  *handle = &board_handle[number];
  return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  BEGIN(nvmlDeviceGetHandleByPciBusId_v2);
  unsigned domain, bus;
  if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || !bus || bus > (unsigned)boards()) return NVML_NOT_FOUND;
  *handle = &board_handle[bus - 1];
  return NVML_SUCCESS;
}

API int nvmlDeviceGetHandleByPciBusId(const char *id, void **handle) {
  return nvmlDeviceGetHandleByPciBusId_v2(id, handle);
}

API int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  BEGIN_DEVICE(nvmlDeviceGetIndex, handle);
  *index = (unsigned)(it.instance ? nvml_info(&it)->instance - 1 : it.board);
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMinorNumber(void *handle, unsigned *number) {
  BEGIN_DEVICE(nvmlDeviceGetMinorNumber, handle);
  if (it.instance) return NVML_NOT_SUPPORTED;
  *number = (unsigned)it.board;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
  BEGIN_DEVICE(nvmlDeviceGetName, handle);
  char name[sizeof nvml_info(&it)->name];
  snprintf(name, sizeof name, "%s", nvml_info(&it)->name);
  char *instance = strstr(name, " MIG "); /* "Virtual A100-40GB MIG 3g.20gb": the board is what comes before */
  if (!it.instance && instance) *instance = 0;
  return nvml_text(out, size, name);
}

/* ---- MIG */

API int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  BEGIN_DEVICE(nvmlDeviceGetMigMode, handle);
  if (nvml_info(&it)->major < 8) return NVML_NOT_SUPPORTED;
  *current = *pending = (unsigned)is_split(&it);
  return NVML_SUCCESS;
}

API int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is) {
  BEGIN_DEVICE(nvmlDeviceIsMigDeviceHandle, handle);
  *is = (unsigned)it.instance;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  BEGIN_DEVICE(nvmlDeviceGetMaxMigDeviceCount, handle);
  *count = is_split(&it) ? 7 : 0;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out) {
  BEGIN_DEVICE(nvmlDeviceGetMigDeviceHandleByIndex, handle);
  for (int i = 0; i < nvml_table->devices; i++) {
    const device_info *device = &nvml_table->device[i];
    if (device->gpu != it.board || device->instance != (int)index + 1) continue;
    *out = &instance_handle[i];
    return NVML_SUCCESS;
  }
  return NVML_NOT_FOUND;
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out) {
  BEGIN_DEVICE(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle);
  if (!it.instance) return NVML_INVALID_ARGUMENT;
  *out = &board_handle[it.board];
  return NVML_SUCCESS;
}

API int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
  BEGIN_DEVICE(nvmlDeviceGetGpuInstanceId, handle);
  if (!it.instance) return NVML_NOT_SUPPORTED;
  *id = (unsigned)nvml_info(&it)->instance;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) {
  BEGIN_DEVICE(nvmlDeviceGetComputeInstanceId, handle);
  if (!it.instance) return NVML_NOT_SUPPORTED;
  *id = 0;
  return NVML_SUCCESS;
}
