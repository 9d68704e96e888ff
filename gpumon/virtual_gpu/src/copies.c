/* Copies and fills. They carry real bytes, so that data a program uploaded comes back when it asks for it.
 *
 * Kernels compute nothing, so what they should have written is missing. A program that reads one number from the device
 * (.item(), a count, a flag) reads zero, unless it reads back what was uploaded (uploads.c). Larger reads give the bytes
 * that are there: uploads (checkpoints, what gloo sends between ranks), else what the memory held, zeros at first.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "gpu.h"

#define SCALAR_BYTES 16

/* Copying between device buffers that only kernels write moves nothing worth moving: large copies stop early. */
static size_t limit(const char *name, const char *otherwise) {
  return strtoull(setting(name, otherwise), 0, 10);
}

static size_t longest_copy(int between_devices) {
  static size_t any, device;
  if (!any) {
    device = limit("VGPU_DEVICE_COPY_MAX", "65536");
    any = limit("VGPU_COPY_MAX", "67108864");
  }
  return between_devices ? device : any;
}

static int scalars_are_zero(void) {
  static int zero = -1;
  if (zero < 0) zero = strcmp(setting("VGPU_SCALARS", "zero"), "zero") == 0;
  return zero;
}

static int is_zero(const char *page, size_t size) {
  const u64 *words = (const u64 *)page;
  for (size_t i = 0; i < size / sizeof *words; i++) {
    if (words[i]) return 0;
  }
  return 1;
}

/* An upload of what nobody wrote yet (a model made without initializing it) must not make two gigabytes resident: a
 * page of zeros that goes where zeros are is only looked at. */
static void upload(char *to, const char *from, size_t size) {
  enum { PAGE = 4096 };
  while (size) {
    size_t part = size < PAGE ? size : PAGE;
    int aligned = part == PAGE && !(((uintptr_t)to | (uintptr_t)from) % sizeof(u64));
    if (!aligned || !is_zero(from, PAGE) || !is_zero(to, PAGE)) memmove(to, from, part);
    to += part;
    from += part;
    size -= part;
  }
}

static int copy(void *to, const void *from, size_t size) {
  region ignored;
  int to_device = vgpu_is_device(to, &ignored), from_device = vgpu_is_device(from, &ignored);
  size_t longest = longest_copy(to_device && from_device);
  int known = !from_device || vgpu_is_upload(from, size);
  int is_message = from_device && size <= MESSAGE_MAX && vgpu_is_message(from, size);
  if (to_device && from_device && (is_message || vgpu_awaited(from, size) || vgpu_awaited(to, size))) {
    if (known && longest < MESSAGE_MAX) longest = MESSAGE_MAX;
    vgpu_work(&(local_work){WORK_COPY, to, size, {from}, {size < longest ? size : longest}, .known = known});
    return SUCCESS;
  }
  vgpu_wait_for_range(from, size);
  vgpu_wait_for_range(to, size);
  if (from_device) known = vgpu_is_upload(from, size); /* what has come may have been unknown there, too */
  if (from_device && !to_device) {
    vgpu_synchronize();
    if (size <= SCALAR_BYTES && !known && scalars_are_zero()) {
      memset(to, 0, size);
      if (size == 1 && vgpu_all_was_launched()) *(char *)to = 1;
      else vgpu_note_read();
      return SUCCESS;
    }
  }
  size_t carried = size < longest ? size : longest;
  if (to_device && !from_device) upload(to, from, carried);
  else memmove(to, from, carried);
  if (to_device) {
    if (known) vgpu_note_upload(to, size);
    else vgpu_forget_upload(to, size);
  }
  return SUCCESS;
}

static int checked_copy(void *to, const void *from, size_t size) {
  int status = vgpu_check_device();
  return status || !size ? status : copy(to, from, size);
}

API int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  region ignored;
  if (!vgpu_is_device(to, &ignored)) vgpu_wait_for_lanes(vgpu_stream(0)->needs);
  return checked_copy(to, from, size);
}

/* Work on the stream like a kernel; a copy to the host has waited for the device already. */
static int queued_copy(void *to, const void *from, size_t size, void *stream) {
  region ignored;
  if (!vgpu_is_device(to, &ignored)) vgpu_wait_for_lanes(vgpu_stream(stream)->needs);
  int status = checked_copy(to, from, size);
  return !status && vgpu_is_device(to, &ignored) ? vgpu_launch(stream) : status;
}

API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  return queued_copy(to, from, size, stream);
}

API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
  return queued_copy(to, from, size, stream);
}

API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                          int kind, void *stream) {
  region ignored;
  int status = vgpu_check_device();
  if (status) return status;
  if (width * height > longest_copy(1) && vgpu_is_device(to, &ignored) && vgpu_is_device(from, &ignored)) return SUCCESS;
  for (size_t row = 0; row < height; row++) {
    copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  }
  return SUCCESS;
}

int vgpu_fill(void *to, int value, size_t size) {
  vgpu_wait_for_range(to, size);
  vgpu_note_upload(to, size);
  if (size < PAGE_2M) {
    memset(to, value, size);
    return SUCCESS;
  }
  if (value) {
    memset(to, value, 4096); /* a large pattern nobody computes with is not worth its pages */
    return SUCCESS;
  }
  /* Dropped pages read back as zeros and cost nothing. */
  char *first = (char *)vgpu_round_up((size_t)to, 4096);
  char *last = (char *)(((size_t)to + size) & ~(size_t)4095);
  memset(to, 0, first - (char *)to);
  memset(last, 0, (char *)to + size - last);
  return madvise(first, last - first, MADV_DONTNEED) ? vgpu_fail(ERROR_INVALID_VALUE) : SUCCESS;
}

API int cudaMemset(void *to, int value, size_t size) {
  int status = vgpu_check_device();
  return status ? status : vgpu_fill(to, value, size);
}

API int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  int status = cudaMemset(to, value, size);
  return status ? status : vgpu_launch(stream);
}

API int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
  return SUCCESS; /* only kernels read __device__ variables */
}

/* A __device__ variable gets a page of its own the first time its address is asked for. */
API int cudaGetSymbolAddress(void **out, const void *symbol) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static struct {
    const void *symbol;
    void *memory;
  } known_symbols[256];
  static int count;
  int i = 0;
  pthread_mutex_lock(&mutex);
  while (i < count && known_symbols[i].symbol != symbol) i++;
  if (i == count && count < 256) {
    known_symbols[count].symbol = symbol;
    known_symbols[count++].memory = vgpu_map_pages(PAGE_2M, PROT_READ | PROT_WRITE);
  }
  pthread_mutex_unlock(&mutex);
  *out = i < 256 ? known_symbols[i].memory : 0;
  return *out ? SUCCESS : vgpu_fail(ERROR_INVALID_VALUE);
}
