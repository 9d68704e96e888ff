/* Streams and events, and a clock that makes work complete later than it is queued, as on a device.
 *
 * The clock of a device counts launches. Work queued at t is done at t + VGPU_STREAM_DELAY launches, or as soon as the
 * host waits for it, or when the host launched nothing for a while: then the device has caught up. So memory held back
 * by record_stream stays held for a number of launches that does not depend on how fast this machine is.
 */
#include <time.h>

#include "gpu.h"

#define IDLE_NANOSECONDS 200000000ll

typedef struct {
  int device;
  unsigned flags;
  int recorded;
  u64 due; /* device clock at which the work before it is done */
  u64 needs[LANES];
  struct timespec when;
} event;

typedef struct {
  u64 clock;    /* launches so far, and what waiting has added */
  u64 last_due; /* when everything queued is done */
  long long launched_at;
} timeline;

static timeline timelines[MAX_DEVICES];
static stream default_streams[MAX_DEVICES];

static u64 delay(void) {
  static long long launches = -1;
  if (launches < 0) launches = atoll(setting("VGPU_STREAM_DELAY", "32"));
  return (u64)launches;
}

static long long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static u64 load(u64 *value) { return __atomic_load_n(value, __ATOMIC_RELAXED); }

static void raise_to(u64 *value, u64 at_least) {
  u64 now = load(value);
  while (now < at_least && !__atomic_compare_exchange_n(value, &now, at_least, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

/* 0, 1 and 2 name the default stream: of the thread's device */
stream *vgpu_stream(void *handle) {
  if ((uintptr_t)handle > 2) return handle;
  default_streams[vgpu_current].device = vgpu_current;
  return &default_streams[vgpu_current];
}

/* ---- the clock */

int vgpu_launch(void *handle) {
  int status = vgpu_check_device();
  if (status) return status;
  stream *queue = vgpu_stream(handle);
  timeline *time = &timelines[queue->device];
  if (queue->capturing) {
    queue->captured_launches++; /* it will run when the graph does */
    return SUCCESS;
  }
  u64 due = __atomic_add_fetch(&time->clock, 1, __ATOMIC_RELAXED) + delay();
  raise_to(&queue->done, due);
  raise_to(&time->last_due, due);
  if (delay()) __atomic_store_n(&time->launched_at, nanoseconds(), __ATOMIC_RELAXED);
  process_info *process = vgpu_process();
  if (process) __atomic_add_fetch(&process->launches[vgpu_physical(queue->device)], 1, __ATOMIC_RELAXED);
  return SUCCESS;
}

int vgpu_launched(void) {
  return vgpu_launch(0);
}

static int is_done(int device, u64 due) {
  timeline *time = &timelines[device];
  if (load(&time->clock) >= due) return 1;
  if (nanoseconds() - __atomic_load_n(&time->launched_at, __ATOMIC_RELAXED) < IDLE_NANOSECONDS) return 0;
  raise_to(&time->clock, load(&time->last_due)); /* the host fell silent, so the device has caught up */
  return 1;
}

void vgpu_synchronize(void) {
  timeline *time = &timelines[vgpu_current];
  raise_to(&time->clock, load(&time->last_due));
}

static void depend(u64 *needs, const u64 *on) {
  for (int i = 0; i < LANES; i++) raise_to(&needs[i], load((u64 *)&on[i]));
}

void vgpu_synchronize_stream(void *handle) {
  stream *queue = vgpu_stream(handle);
  vgpu_wait_for_lanes(queue->needs);
  raise_to(&timelines[queue->device].clock, load(&queue->done));
}

/* ---- streams */

API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
  int status = vgpu_check_device();
  if (status) return status;
  stream *created = calloc(1, sizeof *created);
  created->device = vgpu_current;
  created->flags = flags;
  created->priority = priority;
  *out = created;
  return SUCCESS;
}

API int cudaStreamCreateWithFlags(void **out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
API int cudaStreamCreate(void **out) { return cudaStreamCreateWithPriority(out, 0, 0); }

API int cudaStreamDestroy(void *handle) {
  if ((uintptr_t)handle > 2) free(handle);
  return SUCCESS;
}

API int cudaStreamGetPriority(void *handle, int *priority) {
  *priority = vgpu_stream(handle)->priority;
  return SUCCESS;
}

API int cudaStreamGetFlags(void *handle, unsigned *flags) {
  *flags = vgpu_stream(handle)->flags;
  return SUCCESS;
}

API int cudaStreamGetDevice(void *handle, int *device) {
  *device = vgpu_stream(handle)->device;
  return SUCCESS;
}

API int cudaStreamGetId(void *handle, u64 *id) {
  *id = (u64)(uintptr_t)handle;
  return SUCCESS;
}

API int cudaStreamQuery(void *handle) {
  int status = vgpu_check_device();
  if (status) return status;
  stream *queue = vgpu_stream(handle);
  return is_done(queue->device, load(&queue->done)) ? SUCCESS : vgpu_fail(ERROR_NOT_READY);
}

API int cudaStreamSynchronize(void *handle) {
  int status = vgpu_check_device();
  if (!status) vgpu_synchronize_stream(handle);
  return status;
}

API int cudaStreamWaitEvent(void *handle, void *awaited, unsigned flags) {
  raise_to(&vgpu_stream(handle)->done, ((event *)awaited)->due);
  depend(vgpu_stream(handle)->needs, ((event *)awaited)->needs);
  return SUCCESS;
}

/* The host function would run on the device's time; nothing it could wait for takes any. */
API int cudaStreamAddCallback(void *handle, void (*function)(void *, int, void *), void *argument, unsigned flags) {
  function(handle, SUCCESS, argument);
  return SUCCESS;
}

API int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *argument) {
  function(argument);
  return SUCCESS;
}

/* ---- events */

API int cudaEventCreateWithFlags(void **out, unsigned flags) {
  int status = vgpu_check_device();
  if (status) return status;
  event *created = calloc(1, sizeof *created);
  created->device = vgpu_current;
  created->flags = flags;
  *out = created;
  return SUCCESS;
}

API int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

API int cudaEventDestroy(void *handle) {
  free(handle);
  return SUCCESS;
}

API int cudaEventRecord(void *handle, void *stream_handle) {
  int status = vgpu_check_device();
  if (status) return status;
  event *recorded = handle;
  stream *queue = vgpu_stream(stream_handle);
  recorded->device = queue->device;
  recorded->due = load(&queue->done);
  for (int i = 0; i < LANES; i++) recorded->needs[i] = load(&queue->needs[i]);
  recorded->recorded = 1;
  if (!(recorded->flags & 2)) clock_gettime(CLOCK_MONOTONIC, &recorded->when); /* 2: cudaEventDisableTiming */
  return SUCCESS;
}

API int cudaEventRecordWithFlags(void *handle, void *stream_handle, unsigned flags) {
  return cudaEventRecord(handle, stream_handle);
}

API int cudaEventQuery(void *handle) {
  const event *asked = handle;
  if (table_lost(vgpu_table, vgpu_physical(asked->device))) return vgpu_fail(ERROR_LAUNCH_FAILURE);
  return is_done(asked->device, asked->due) ? SUCCESS : vgpu_fail(ERROR_NOT_READY);
}

API int cudaEventSynchronize(void *handle) {
  const event *awaited = handle;
  if (table_lost(vgpu_table, vgpu_physical(awaited->device))) return vgpu_fail(ERROR_LAUNCH_FAILURE);
  vgpu_wait_for_lanes(awaited->needs);
  raise_to(&timelines[awaited->device].clock, awaited->due);
  return SUCCESS;
}

/* Host time between the two records: kernels take none. */
API int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
  const event *start = from, *end = to;
  if (!start->recorded || !end->recorded) return vgpu_fail(ERROR_INVALID_VALUE);
  *milliseconds = (float)((end->when.tv_sec - start->when.tv_sec) * 1e3 + (end->when.tv_nsec - start->when.tv_nsec) * 1e-6);
  return SUCCESS;
}

API int cudaEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
  return cudaEventElapsedTime(milliseconds, from, to);
}
