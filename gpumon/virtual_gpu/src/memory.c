/* Allocation: every cudaMalloc is charged against the device and backed by host pages that cost nothing until written. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "gpu.h"

/* ---- what is allocated where: an array sorted by address, since most questions are "what is at this pointer?" */

static pthread_mutex_t region_mutex = PTHREAD_MUTEX_INITIALIZER;
static region *regions;
static size_t region_count, region_capacity;

/* Fork may catch another thread inside; the child starts with the table as it is and the lock open. */
static void lock_for_fork(void) { pthread_mutex_lock(&region_mutex); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&region_mutex); }

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
}

/* Index of the first region that begins after the address. */
static size_t first_after(uintptr_t address) {
  size_t low = 0, high = region_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (regions[middle].base <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The region that holds the address, with the lock held. */
static region *at(const void *pointer) {
  size_t i = first_after((uintptr_t)pointer);
  if (!i || (uintptr_t)pointer >= regions[i - 1].base + regions[i - 1].size) return 0;
  return &regions[i - 1];
}

void vgpu_add_region(void *base, size_t size, int device, int kind) {
  pthread_mutex_lock(&region_mutex);
  if (region_count == region_capacity) {
    region_capacity = region_capacity ? region_capacity * 2 : 256;
    regions = realloc(regions, region_capacity * sizeof *regions);
  }
  size_t i = first_after((uintptr_t)base);
  memmove(regions + i + 1, regions + i, (region_count - i) * sizeof *regions);
  regions[i] = (region){.base = (uintptr_t)base, .size = size, .device = device, .kind = kind};
  region_count++;
  pthread_mutex_unlock(&region_mutex);
}

int vgpu_find_region(const void *pointer, region *out) {
  pthread_mutex_lock(&region_mutex);
  const region *found = at(pointer);
  if (found) *out = *found;
  pthread_mutex_unlock(&region_mutex);
  return found != 0;
}

int vgpu_remove_region(const void *base, region *out) {
  pthread_mutex_lock(&region_mutex);
  region *found = at(base);
  if (found && found->base == (uintptr_t)base) {
    *out = *found;
    size_t i = (size_t)(found - regions);
    memmove(regions + i, regions + i + 1, (region_count - i - 1) * sizeof *regions);
    region_count--;
  } else {
    found = 0;
  }
  pthread_mutex_unlock(&region_mutex);
  return found != 0;
}

int vgpu_is_device(const void *pointer, region *out) {
  return vgpu_find_region(pointer, out) && (out->kind == MEMORY_DEVICE || out->kind == MEMORY_RESERVED);
}

/* ---- device memory */

/* Where the next range of address space is asked for. The allocator chooses among equal free blocks by address: only
 * if addresses follow from the allocations alone, and not from where the process happened to map other things, do two
 * runs of one script agree to the byte. Ranges ascend and are not used again. */
static uintptr_t next_address = 0x100000000000;

/* Address space aligned to 2 MiB, as the driver's is; the kernel commits a page when it is written. */
void *vgpu_map_pages(size_t size, int protection) {
  void *hint = (void *)__atomic_fetch_add(&next_address, vgpu_round_up(size, PAGE_2M), __ATOMIC_RELAXED);
  void *pages = mmap(hint, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == hint) return pages;
  if (pages != MAP_FAILED) munmap(pages, size); /* taken, or beyond the address space: anywhere, then */
  size_t wanted = size + PAGE_2M;
  char *start = mmap(0, wanted, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  char *aligned = (char *)vgpu_round_up((size_t)start, PAGE_2M);
  if (aligned > start) munmap(start, aligned - start);
  if (start + wanted > aligned + size) munmap(aligned + size, start + wanted - (aligned + size));
  return aligned;
}

int vgpu_allocate(void **out, size_t size, int kind) {
  *out = 0;
  int status = vgpu_check_device();
  if (status) return status;
  if (!size) return SUCCESS;
  size_t pages = vgpu_round_up(size, PAGE_2M);
  if (pages < size || vgpu_charge(vgpu_current, (int64_t)pages)) return vgpu_fail(ERROR_OUT_OF_MEMORY);
  void *memory = vgpu_map_pages(pages, PROT_READ | PROT_WRITE);
  if (!memory) {
    vgpu_charge(vgpu_current, -(int64_t)pages);
    return vgpu_fail(ERROR_OUT_OF_MEMORY);
  }
  madvise(memory, pages, MADV_NOHUGEPAGE); /* one small write must not commit 2 MiB */
  vgpu_add_region(memory, pages, vgpu_current, kind);
  *out = memory;
  return SUCCESS;
}

int vgpu_free(void *pointer) {
  region freed;
  if (!pointer) return vgpu_check_device();
  vgpu_synchronize(); /* cudaFree waits for the device */
  if (vgpu_find_region(pointer, &freed)) vgpu_wait_for_range((void *)freed.base, freed.size);
  if (!vgpu_remove_region(pointer, &freed)) return vgpu_fail(ERROR_INVALID_VALUE);
  vgpu_forget_upload(pointer, freed.size);
  munmap((void *)freed.base, freed.size);
  vgpu_charge(freed.device, -(int64_t)freed.size);
  return SUCCESS;
}

API int cudaMalloc(void **out, size_t size) { return vgpu_allocate(out, size, MEMORY_DEVICE); }
API int cudaMallocManaged(void **out, size_t size, unsigned flags) { return vgpu_allocate(out, size, MEMORY_MANAGED); }
API int cudaFree(void *pointer) { return vgpu_free(pointer); }
API int cudaMallocAsync(void **out, size_t size, void *stream) { return vgpu_allocate(out, size, MEMORY_DEVICE); }
API int cudaFreeAsync(void *pointer, void *stream) { return vgpu_free(pointer); }

/* ---- pinned host memory: not the device's, so not charged */

API int cudaHostAlloc(void **out, size_t size, unsigned flags) {
  size_t pages = vgpu_round_up(size ? size : 1, 4096);
  *out = mmap(0, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) {
    *out = 0;
    return vgpu_fail(ERROR_OUT_OF_MEMORY);
  }
  vgpu_add_region(*out, pages, vgpu_current, MEMORY_HOST);
  return SUCCESS;
}

API int cudaMallocHost(void **out, size_t size) {
  return cudaHostAlloc(out, size, 0);
}

API int cudaFreeHost(void *pointer) {
  region freed;
  if (pointer && vgpu_remove_region(pointer, &freed)) munmap(pointer, freed.size);
  return SUCCESS;
}

API int cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  vgpu_add_region(pointer, size, vgpu_current, MEMORY_HOST);
  return SUCCESS;
}

API int cudaHostUnregister(void *pointer) {
  region removed;
  return vgpu_remove_region(pointer, &removed) ? SUCCESS : vgpu_fail(ERROR_INVALID_VALUE);
}

API int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  *device = host;
  return SUCCESS;
}

API int cudaPointerGetAttributes(pointer_attributes *attributes, const void *pointer) {
  region found;
  memset(attributes, 0, sizeof *attributes);
  if (!vgpu_find_region(pointer, &found)) {
    attributes->device = -2; /* cudaInvalidDeviceId: memory CUDA does not know */
    attributes->hostPointer = (void *)pointer;
    return SUCCESS;
  }
  attributes->type = found.kind == MEMORY_RESERVED ? MEMORY_DEVICE : found.kind;
  attributes->device = found.device;
  attributes->devicePointer = (void *)pointer;
  if (found.kind == MEMORY_HOST || found.kind == MEMORY_MANAGED) attributes->hostPointer = (void *)pointer;
  return SUCCESS;
}

/* ---- stream-ordered pools, enough for PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync */

static char pool_of_device[MAX_DEVICES];

API int cudaDeviceGetDefaultMemPool(void **pool, int ordinal) {
  *pool = &pool_of_device[ordinal];
  return SUCCESS;
}

API int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  long ordinal = (char *)pool - pool_of_device;
  if (ordinal < 0 || ordinal >= vgpu_devices()) return vgpu_fail(ERROR_INVALID_VALUE);
  const process_info *process = vgpu_process();
  int device = vgpu_physical((int)ordinal);
  switch (attribute) {
    case 5: case 7: *(u64 *)value = process ? process->held[device] : 0; break; /* reserved, used: now */
    case 6: case 8: *(u64 *)value = process ? process->peak[device] : 0; break; /* and at most */
    case 4: *(u64 *)value = 0; break;                                           /* release threshold */
    default: *(int *)value = 1;                                                 /* kinds of reuse allowed */
  }
  return SUCCESS;
}

API int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { return SUCCESS; }
API int cudaMemPoolSetAccess(void *pool, const void *description, size_t count) { return SUCCESS; }
API int cudaMemPoolTrimTo(void *pool, size_t size) { return SUCCESS; }

API int cudaDeviceGetGraphMemAttribute(int ordinal, int attribute, void *value) {
  *(u64 *)value = 0;
  return SUCCESS;
}

API int cudaDeviceSetGraphMemAttribute(int ordinal, int attribute, void *value) { return SUCCESS; }
