/* Faults: what shall go wrong in NVML, for the whole session (in the table) or this process (VGPU_NVML_FAULTS).
 *
 * "nvmlDeviceGetPowerUsage=na,nvmlDeviceGetMemoryInfo=hang": na, error, lost, nopermission, nodriver, hang, slow:MS or
 * a number of nvmlReturn_t; the name "nvml" means every function. A name covers its later versions (_v2, …).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nvml.h"

int nvml_option(const char *name, char *value, size_t size) {
  if (list_value(setting("VGPU_NVML_FAULTS", ""), name, value, size)) return 1;
  return nvml_table && list_value(nvml_table->faults, name, value, size);
}

static int fault_for(const char *function, char *value, size_t size) {
  char name[96];
  snprintf(name, sizeof name, "%s", function);
  if (nvml_option(name, value, size)) return 1;
  char *version = strrchr(name, '_');
  if (version && version[1] == 'v') {
    *version = 0;
    if (nvml_option(name, value, size)) return 1;
  }
  return nvml_option("nvml", value, size);
}

static void sleep_milliseconds(long milliseconds) {
  struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, 0);
}

int vgpu_nvml_fault(const char *function) {
  char value[32];
  if (!fault_for(function, value, sizeof value)) return NVML_SUCCESS;
  if (!strcmp(value, "na")) return NVML_NOT_SUPPORTED;
  if (!strcmp(value, "error")) return NVML_UNKNOWN;
  if (!strcmp(value, "lost")) return NVML_GPU_IS_LOST;
  if (!strcmp(value, "nopermission")) return NVML_NO_PERMISSION;
  if (!strcmp(value, "nodriver")) return NVML_DRIVER_NOT_LOADED;
  if (!strcmp(value, "hang")) {
    for (;;) pause();
  }
  if (!strncmp(value, "slow:", 5)) {
    sleep_milliseconds(atol(value + 5));
    return NVML_SUCCESS;
  }
  return atoi(value);
}

/* Called by `python -m gpumon.virtual_gpu fault`: replaces the session's faults. 0 where there is no such table. */
API int vgpu_set_faults(const char *session, const char *faults) {
  shared_table *table = table_open(session, 0);
  if (!table) return 0;
  table_lock(table);
  snprintf(table->faults, sizeof table->faults, "%s", faults);
  table_unlock(table);
  return 1;
}
