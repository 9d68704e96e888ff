/* NVML's moving figures: processes on a device, utilization, temperature, power, clocks. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "nvml.h"

#define FULL_LOAD_LAUNCHES_PER_S 5000.0
#define NOT_AVAILABLE 0xffffffffffffffffull /* NVML_VALUE_NOT_AVAILABLE */
#define NO_INSTANCE 0xffffffffu
#define FOREIGN_PIDS 4194304u /* above the kernel's largest pid: a number that means nothing in this pid namespace */

/* Nothing computes here, so that nothing is busy, warm or fed: figures only where they are asked for (VGPU_SENSORS),
 * then made of the rate of kernel launches. */
#define INVENTED \
  if (strcmp(setting("VGPU_SENSORS", ""), "invented")) return NVML_NOT_SUPPORTED

/* ---- rates */

typedef struct {
  double seconds;
  uint64_t launches;
  unsigned percent;
} rate;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Launches since the last question, as a share of what a busy device takes; over 0.1 s at least. */
static unsigned update(rate *last, uint64_t launches) {
  double seconds = now(), passed = seconds - last->seconds;
  if (last->seconds != 0 && launches >= last->launches && passed < 0.1) return last->percent;
  double percent = (double)(launches - last->launches) / passed / FULL_LOAD_LAUNCHES_PER_S * 100;
  if (last->seconds == 0 || launches < last->launches) percent = 0;
  *last = (rate){seconds, launches, percent > 100 ? 100 : (unsigned)(percent + 0.5)};
  return last->percent;
}

unsigned nvml_utilization(const target *of) {
  static rate last[MAX_DEVICES];
  uint64_t launches = 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    const process_info *process = &nvml_table->process[i];
    if (process->pid && of->device >= 0) launches += process->launches[of->device];
  }
  return update(&last[of->board], launches);
}

/* A board that is split has no figure of its own, nor has an instance. */
#define NOT_FOR_MIG \
  if (it.device < 0 || it.instance) return NVML_NOT_SUPPORTED

API int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
  BEGIN_DEVICE(nvmlDeviceGetUtilizationRates, handle);
  INVENTED;
  NOT_FOR_MIG;
  rates[0] = nvml_utilization(&it);
  rates[1] = rates[0] / 2;
  return NVML_SUCCESS;
}

static int idle_unit(unsigned *utilization, unsigned *period) {
  *utilization = 0;
  *period = 167000;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetEncoderUtilization(void *handle, unsigned *utilization, unsigned *period) {
  BEGIN_DEVICE(nvmlDeviceGetEncoderUtilization, handle);
  INVENTED;
  return idle_unit(utilization, period);
}

API int nvmlDeviceGetDecoderUtilization(void *handle, unsigned *utilization, unsigned *period) {
  BEGIN_DEVICE(nvmlDeviceGetDecoderUtilization, handle);
  INVENTED;
  return idle_unit(utilization, period);
}

static unsigned celsius(const target *of) { return 34 + nvml_utilization(of) * 2 / 5; }

API int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
  BEGIN_DEVICE(nvmlDeviceGetTemperature, handle);
  INVENTED;
  *degrees = celsius(&it);
  return NVML_SUCCESS;
}

/* nvmlTemperature_t: version, sensor, degrees */
API int nvmlDeviceGetTemperatureV(void *handle, unsigned *temperature) {
  BEGIN_DEVICE(nvmlDeviceGetTemperatureV, handle);
  INVENTED;
  temperature[2] = celsius(&it);
  return NVML_SUCCESS;
}

API int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  BEGIN_DEVICE(nvmlDeviceGetPowerUsage, handle);
  INVENTED;
  *milliwatts = 62000 + nvml_utilization(&it) * 3300;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
  BEGIN_DEVICE(nvmlDeviceGetEnforcedPowerLimit, handle);
  INVENTED;
  *milliwatts = 400000;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *milliwatts) {
  BEGIN_DEVICE(nvmlDeviceGetPowerManagementLimit, handle);
  INVENTED;
  *milliwatts = 400000;
  return NVML_SUCCESS;
}

/* nvmlClockType_t 2 is memory */
API int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *megahertz) {
  BEGIN_DEVICE(nvmlDeviceGetClockInfo, handle);
  INVENTED;
  *megahertz = type == 2 ? 1215 : nvml_utilization(&it) ? 1410 : 210;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *megahertz) {
  BEGIN_DEVICE(nvmlDeviceGetMaxClockInfo, handle);
  INVENTED;
  *megahertz = type == 2 ? 1215 : 1410;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetPerformanceState(void *handle, int *state) {
  BEGIN_DEVICE(nvmlDeviceGetPerformanceState, handle);
  INVENTED;
  *state = nvml_utilization(&it) ? 0 : 8;
  return NVML_SUCCESS;
}

/* ---- settings that do not change */

#define ANSWERS(function, value) \
  API int function(void *handle, int *out) { \
    BEGIN_DEVICE(function, handle); \
    *out = value; \
    return NVML_SUCCESS; \
  }

ANSWERS(nvmlDeviceGetPersistenceMode, 1)
ANSWERS(nvmlDeviceGetDisplayActive, 0)
ANSWERS(nvmlDeviceGetDisplayMode, 0)
ANSWERS(nvmlDeviceGetComputeMode, 0)

API int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
  BEGIN_DEVICE(nvmlDeviceGetTotalEccErrors, handle);
  *count = 0;
  return NVML_SUCCESS;
}

API int nvmlDeviceGetP2PStatus(void *handle, void *other, int index, int *status) {
  BEGIN_DEVICE(nvmlDeviceGetP2PStatus, handle);
  *status = 0;
  return NVML_SUCCESS;
}

/* ---- processes */

/* nvmlProcessInfo_v1_t and _v2_t: the second adds two fields, so a list cannot be read as the other */
typedef struct {
  unsigned pid;
  unsigned long long bytes;
} process_v1;

typedef struct {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
} process_v2;

/* What a container shows instead of the truth: "bytes" not available, "processes" none, "pids" of another namespace. */
static int hidden(const char *what) {
  char value[16];
  return nvml_option("hide", value, sizeof value) && !strcmp(value, what);
}

static process_v2 describe(const process_info *process, int device) {
  unsigned instance = (unsigned)nvml_table->device[device].instance;
  process_v2 entry = {
      .pid = (unsigned)process->pid + (hidden("pids") ? FOREIGN_PIDS : 0),
      .bytes = hidden("bytes") ? NOT_AVAILABLE : process->held[device] + process->context[device],
      .gpu_instance = instance ? instance : NO_INSTANCE,
      .compute_instance = instance ? 0 : NO_INSTANCE,
  };
  return entry;
}

static int list_processes(const target *of, unsigned *count, void *out, int version) {
  unsigned found = 0, room = out ? *count : 0;
  if (hidden("processes")) {
    *count = 0;
    return NVML_SUCCESS;
  }
  table_lock(nvml_table);
  table_reap(nvml_table);
  for (int i = 0; i < MAX_PROCESSES; i++) {
    const process_info *process = &nvml_table->process[i];
    for (int d = 0; process->pid && d < nvml_table->devices; d++) {
      if (!nvml_belongs(of, d) || !process->has_context[d]) continue;
      process_v2 entry = describe(process, d);
      if (found < room && version == 1) ((process_v1 *)out)[found] = (process_v1){entry.pid, entry.bytes};
      if (found < room && version == 2) ((process_v2 *)out)[found] = entry;
      found++;
    }
  }
  table_unlock(nvml_table);
  *count = found;
  return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define LISTS(function, version) \
  API int function(void *handle, unsigned *count, void *out) { \
    BEGIN_DEVICE(function, handle); \
    return list_processes(&it, count, out, version); \
  }

LISTS(nvmlDeviceGetComputeRunningProcesses, 1)
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, 2)
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, 2)

#define LISTS_NONE(function) \
  API int function(void *handle, unsigned *count, void *out) { \
    BEGIN_DEVICE(function, handle); \
    *count = 0; \
    return NVML_SUCCESS; \
  }

LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses)
LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses_v2)
LISTS_NONE(nvmlDeviceGetGraphicsRunningProcesses_v3)
LISTS_NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* nvmlProcessUtilizationSample_t */
typedef struct {
  unsigned pid;
  unsigned long long microseconds;
  unsigned sm, memory, encoder, decoder;
} utilization_sample;

API int nvmlDeviceGetProcessUtilization(void *handle, utilization_sample *out, unsigned *count,
                                        unsigned long long since) {
  static rate last[MAX_PROCESSES][MAX_DEVICES];
  BEGIN_DEVICE(nvmlDeviceGetProcessUtilization, handle);
  INVENTED;
  NOT_FOR_MIG;
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  unsigned found = 0, room = out ? *count : 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    const process_info *process = &nvml_table->process[i];
    if (!process->pid || !process->has_context[it.device] || hidden("processes")) continue;
    if (found < room) {
      unsigned percent = update(&last[i][it.device], process->launches[it.device]);
      unsigned long long stamp = time.tv_sec * 1000000ull + time.tv_nsec / 1000;
      unsigned pid = describe(process, it.device).pid;
      out[found] = (utilization_sample){pid, stamp, percent, percent / 2, 0, 0};
    }
    found++;
  }
  *count = found;
  return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
