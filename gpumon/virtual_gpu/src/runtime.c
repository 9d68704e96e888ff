/* CUDA runtime: the devices a process sees, its context on each, and its last error. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "gpu.h"

shared_table *vgpu_table;
__thread int vgpu_current;

static __thread int last_error;
static pthread_mutex_t start_mutex = PTHREAD_MUTEX_INITIALIZER;
static int started;
static int visible;                  /* devices this process sees */
static int physical[MAX_DEVICES];    /* CUDA ordinal -> device of the table */
static process_info *process;        /* our entry; NULL until the first use of a device */

/* ---- start */

/* A forked child has no device of its own yet: it must not change its parent's entry. */
static void in_child(void) {
  process = 0;
  pthread_mutex_init(&start_mutex, 0);
}

/* The unsigned index in "GPU-564700<index>-…" or "MIG-564700<index>-…", as cudaDeviceProp.uuid and NVML give it. */
static int device_of_uuid(const char *text, int *device) {
  unsigned index;
  if (sscanf(text, "GPU-564700%2x", &index) != 1 && sscanf(text, "MIG-564700%2x", &index) != 1) return 0;
  *device = (int)index;
  return *device < vgpu_table->devices;
}

static int in_cuda_order(int ordinal) {
  return strcmp(setting("CUDA_DEVICE_ORDER", ""), "PCI_BUS_ID") ? vgpu_table->cuda_order[ordinal] : ordinal;
}

/* CUDA_VISIBLE_DEVICES ends at the first entry that names no device, as with the real driver. */
static void choose_visible(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) {
    for (int i = 0; i < vgpu_table->devices; i++) physical[visible++] = in_cuda_order(i);
    /* CUDA enumerates one MIG instance at most unless it is told which. */
    if (visible > 1 && vgpu_table->device[physical[0]].instance) visible = 1;
    return;
  }
  for (const char *item = list; *item && visible < MAX_DEVICES;) {
    char *end;
    long ordinal = strtol(item, &end, 10);
    int device;
    if (end == item) {
      if (!device_of_uuid(item, &device)) return;
    } else {
      if (ordinal < 0 || ordinal >= vgpu_table->devices) return;
      device = in_cuda_order((int)ordinal);
    }
    physical[visible++] = device;
    item += strcspn(item, ",");
    if (*item) item++;
  }
}

int vgpu_devices(void) {
  if (__atomic_load_n(&started, __ATOMIC_ACQUIRE)) return visible;
  pthread_mutex_lock(&start_mutex);
  if (!started) {
    vgpu_table = table_open(setting("VGPU_SESSION", "default"), 1);
    if (vgpu_table) choose_visible();
    pthread_atfork(0, 0, in_child);
    __atomic_store_n(&started, 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&start_mutex);
  return visible;
}

/* ---- state */

int vgpu_physical(int ordinal) {
  return physical[ordinal];
}

const device_info *vgpu_device(int ordinal) {
  return &vgpu_table->device[physical[ordinal]];
}

process_info *vgpu_process(void) {
  return process;
}

int vgpu_has_context(int ordinal) {
  return process && process->has_context[physical[ordinal]];
}

size_t vgpu_round_up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

int vgpu_fail(int status) {
  last_error = status;
  return status;
}

/* Keeps the device's record, after it gave something. */
static void note_highest(int device) {
  device_record *record = &vgpu_table->record[device];
  uint64_t used = table_used(vgpu_table, device);
  if (used <= record->used) return;
  record->used = used;
  record->contexts = 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    if (vgpu_table->process[i].pid) record->contexts += vgpu_table->process[i].context[device];
  }
}

static int charge_locked(int device, int64_t bytes) {
  if (!process) process = table_enter(vgpu_table);
  if (!process) return ERROR_OUT_OF_MEMORY;
  const device_info *info = &vgpu_table->device[device];
  int first = !process->has_context[device];
  uint64_t need = (bytes > 0 ? (uint64_t)bytes : 0) + (first ? info->context : 0);
  if (need) {
    table_reap(vgpu_table); /* the memory of a process that was killed is free */
    if (table_used(vgpu_table, device) + need > info->total) {
      vgpu_table->record[device].refusals++;
      vgpu_table->record[device].refused_bytes = need;
      return ERROR_OUT_OF_MEMORY;
    }
  }
  if (first) {
    process->has_context[device] = 1;
    process->context[device] = info->context;
    vgpu_trace("pid %d: context on device %d", getpid(), device);
  }
  process->held[device] += bytes;
  if (process->held[device] > process->peak[device]) process->peak[device] = process->held[device];
  if (need) note_highest(device);
  return SUCCESS;
}

int vgpu_charge(int ordinal, int64_t bytes) {
  table_lock(vgpu_table);
  int status = charge_locked(physical[ordinal], bytes);
  table_unlock(vgpu_table);
  return status;
}

int vgpu_check_device(void) {
  if (vgpu_current >= vgpu_devices()) return vgpu_fail(ERROR_NO_DEVICE);
  if (table_lost(vgpu_table, physical[vgpu_current])) return vgpu_fail(ERROR_LAUNCH_FAILURE);
  if (!vgpu_has_context(vgpu_current) && vgpu_charge(vgpu_current, 0)) return vgpu_fail(ERROR_OUT_OF_MEMORY);
  return SUCCESS;
}

/* ---- errors and versions */

API int cudaGetLastError(void) {
  int status = last_error;
  last_error = SUCCESS;
  return status;
}

API int cudaPeekAtLastError(void) {
  return last_error;
}

API const char *cudaGetErrorName(int status) {
  switch (status) {
    case SUCCESS: return "cudaSuccess";
    case ERROR_INVALID_VALUE: return "cudaErrorInvalidValue";
    case ERROR_OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case ERROR_NO_DEVICE: return "cudaErrorNoDevice";
    case ERROR_INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case ERROR_NO_KERNEL_IMAGE: return "cudaErrorNoKernelImageForDevice";
    case ERROR_NOT_READY: return "cudaErrorNotReady";
    case ERROR_PEER_ACCESS_ALREADY_ENABLED: return "cudaErrorPeerAccessAlreadyEnabled";
    case ERROR_LAUNCH_FAILURE: return "cudaErrorLaunchFailure";
    case ERROR_NOT_SUPPORTED: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
  }
}

API const char *cudaGetErrorString(int status) {
  switch (status) {
    case SUCCESS: return "no error";
    case ERROR_INVALID_VALUE: return "invalid argument";
    case ERROR_OUT_OF_MEMORY: return "out of memory";
    case ERROR_NO_DEVICE: return "no CUDA-capable device is detected";
    case ERROR_INVALID_DEVICE: return "invalid device ordinal";
    case ERROR_NO_KERNEL_IMAGE: return "no kernel image is available for execution on the device";
    case ERROR_NOT_READY: return "device not ready";
    case ERROR_PEER_ACCESS_ALREADY_ENABLED: return "peer access is already enabled";
    case ERROR_LAUNCH_FAILURE: return "unspecified launch failure";
    case ERROR_NOT_SUPPORTED: return "operation not supported on the virtual GPU";
    default: return "unknown error";
  }
}

API int cudaRuntimeGetVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return SUCCESS;
}

API int cudaDriverGetVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return SUCCESS;
}

/* ---- devices */

API int cudaGetDeviceCount(int *count) {
  *count = vgpu_devices();
  return *count ? SUCCESS : vgpu_fail(ERROR_NO_DEVICE);
}

API int cudaGetDevice(int *ordinal) {
  *ordinal = vgpu_current;
  return vgpu_devices() ? SUCCESS : vgpu_fail(ERROR_NO_DEVICE);
}

API int cudaSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= vgpu_devices()) return vgpu_fail(ERROR_INVALID_DEVICE);
  vgpu_current = ordinal;
  return vgpu_check_device();
}

API int cudaDeviceSynchronize(void) {
  int status = vgpu_check_device();
  if (status) return status;
  vgpu_wait_for_all();
  vgpu_synchronize();
  return SUCCESS;
}

API int cudaDeviceReset(void) {
  return SUCCESS;
}

API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return SUCCESS;
}

API int cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  *can = ordinal != peer;
  return SUCCESS;
}

API int cudaDeviceEnablePeerAccess(int ordinal, unsigned flags) {
  return SUCCESS;
}

API int cudaDeviceDisablePeerAccess(int ordinal) {
  return SUCCESS;
}

API int cudaDeviceGetPCIBusId(char *text, int size, int ordinal) {
  if (ordinal < 0 || ordinal >= vgpu_devices()) return vgpu_fail(ERROR_INVALID_DEVICE);
  snprintf(text, size, "0000:%02X:00.0", vgpu_device(ordinal)->gpu + 1);
  return SUCCESS;
}

API int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  int status = vgpu_check_device();
  if (status) return status;
  int device = physical[vgpu_current];
  table_lock(vgpu_table);
  table_reap(vgpu_table);
  uint64_t used = table_used(vgpu_table, device), capacity = vgpu_table->device[device].total;
  table_unlock(vgpu_table);
  if (free_bytes) *free_bytes = used < capacity ? capacity - used : 0;
  if (total) *total = capacity;
  return SUCCESS;
}

API int cudaProfilerStart(void) {
  return SUCCESS;
}

API int cudaProfilerStop(void) {
  return SUCCESS;
}
