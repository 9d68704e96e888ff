/* What the files of the CUDA side share: the process's view of the devices, and how work, memory and errors meet. */
#ifndef VGPU_GPU_H
#define VGPU_GPU_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "abi.h"
#include "table.h"

#define PAGE_2M (2 * MIB)

typedef unsigned long long u64;

/* runtime.c: devices of this process and its last error */
extern shared_table *vgpu_table;
extern __thread int vgpu_current; /* CUDA ordinal of the calling thread's device */
int vgpu_devices(void);           /* how many this process sees; reads the table at the first call */
int vgpu_physical(int ordinal);   /* CUDA ordinal -> device of the table */
int vgpu_fail(int status);        /* remembers the status for cudaGetLastError and returns it */
int vgpu_check_device(void);      /* the current device exists, is not lost, and has its context */
int vgpu_charge(int ordinal, int64_t bytes); /* takes or returns device memory; SUCCESS or ERROR_OUT_OF_MEMORY */
process_info *vgpu_process(void);            /* this process's entry, NULL before it has used a device */
int vgpu_has_context(int ordinal);
size_t vgpu_round_up(size_t size, size_t unit);
const device_info *vgpu_device(int ordinal);

/* memory.c: what is allocated where */
typedef struct {
  uintptr_t base;
  size_t size;
  int device; /* CUDA ordinal */
  int kind;   /* MEMORY_… */
} region;
void *vgpu_map_pages(size_t size, int protection);
int vgpu_allocate(void **out, size_t size, int kind);
int vgpu_free(void *pointer);
void vgpu_add_region(void *base, size_t size, int device, int kind);
int vgpu_find_region(const void *pointer, region *out);
int vgpu_remove_region(const void *base, region *out);
int vgpu_is_device(const void *pointer, region *out);

/* copies.c */
int vgpu_fill(void *to, int value, size_t size);

/* uploads.c: which device bytes are known, because the host wrote them and no kernel can have written them since */
void vgpu_note_upload(const void *start, size_t size);
void vgpu_forget_upload(const void *start, size_t size);
void vgpu_forget_all_uploads(void);
void vgpu_forget_reachable_uploads(void **parameters); /* a kernel with these parameters was launched */
int vgpu_is_upload(const void *start, size_t size);
size_t vgpu_known_bytes(const void *start, size_t size); /* how many of them, from the first on */
void vgpu_note_message(const void *start, size_t size);  /* known, and what ranks tell each other was made into it */
int vgpu_is_message(const void *start, size_t size);

/* waiting.c: work whose bytes have not come from other ranks yet */
#define LANES 16           /* communicators that are told apart, modulo */
#define MESSAGE_MAX (8 * MIB) /* what ranks send each other is moved up to here; more is only counted */

typedef enum { WORK_COPY, WORK_SUM, WORK_MAX, WORK_ADD, WORK_ADD_CONSTANT, WORK_GREATER } work_kind;

typedef struct {
  work_kind kind;
  void *to;
  size_t to_size;
  const void *from[2];
  size_t from_size[2]; /* 0: there is no such input */
  int64_t factor, constant;
  int known; /* whether the inputs are */
} local_work;

void vgpu_work(const local_work *work); /* does it, or remembers it until its bytes have come */
int vgpu_awaited(const void *start, size_t size);
void vgpu_wait_for_range(const void *start, size_t size);
void vgpu_wait_for_lanes(const u64 needs[LANES]);
void vgpu_wait_for_all(void);

/* streams.c: the order of work, and when it is done */
typedef struct stream {
  int device, priority;
  unsigned flags;
  int capturing;
  u64 capture_id, captured_launches;
  u64 done; /* the device clock at which everything queued here is complete */
  u64 needs[LANES]; /* the newest collective of each lane that it depends on */
} stream;
stream *vgpu_stream(void *handle);
int vgpu_launch(void *stream_handle); /* a kernel that does nothing was queued */
int vgpu_all_was_launched(void);      /* this thread's last kernel reduced by `and` */
int vgpu_launched(void);              /* the same, on the current device's default stream */
void vgpu_synchronize(void);          /* everything queued on the current device is done */
void vgpu_synchronize_stream(void *handle);

/* integers.c: the few kernels that are computed */
void vgpu_register_kernel(const void *host, const char *name);
int vgpu_compute(const void *kernel, unsigned inputs, void **parameters);
int vgpu_is_all(const void *kernel);

/* report.c: what is said on stderr */
int vgpu_unsupported(const char *name, int status); /* says so once for each name */
void vgpu_note_read(void); /* a computed scalar was read: says so if an operator makes a shape of it */
void vgpu_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
