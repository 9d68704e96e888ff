/* What the NVML files share: handles, faults, and the common beginning of every function. */
#ifndef VGPU_NVML_H
#define VGPU_NVML_H

#include "abi.h"
#include "table.h"

/* nvmlReturn_t */
enum {
  NVML_SUCCESS = 0,
  NVML_UNINITIALIZED = 1,
  NVML_INVALID_ARGUMENT = 2,
  NVML_NOT_SUPPORTED = 3,
  NVML_NO_PERMISSION = 4,
  NVML_NOT_FOUND = 6,
  NVML_INSUFFICIENT_SIZE = 7,
  NVML_DRIVER_NOT_LOADED = 9,
  NVML_GPU_IS_LOST = 15,
  NVML_UNKNOWN = 999,
};

/* What a handle stands for: a board, or one MIG instance on it. */
typedef struct {
  int board;
  int device;   /* of the table; -1 for a board that is split into instances */
  int instance; /* whether the handle is a MIG instance's */
} target;

extern shared_table *nvml_table;

int vgpu_nvml_fault(const char *function); /* the status it shall fail with, or 0; may sleep, or never return */
int nvml_option(const char *name, char *value, size_t size);
int nvml_target(void *handle, target *out);
int nvml_belongs(const target *to, int device); /* whether a device of the table is what the handle stands for */
const device_info *nvml_info(const target *of);
int nvml_text(char *out, unsigned size, const char *value);
unsigned nvml_utilization(const target *of);

/* Every function begins so: a fault may speak first, then the handle is looked up. */
#define BEGIN(function) \
  do { \
    int status_ = vgpu_nvml_fault(#function); \
    if (status_) return status_; \
    if (!nvml_table) return NVML_UNINITIALIZED; \
  } while (0)

#define BEGIN_DEVICE(function, handle) \
  target it; \
  BEGIN(function); \
  do { \
    int status_ = nvml_target(handle, &it); \
    if (status_) return status_; \
  } while (0)

#endif
