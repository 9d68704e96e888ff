/* Virtual memory management, which expandable segments are made of: addresses, physical memory, and mappings. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "gpu.h"

typedef struct {
  size_t size;
  int device;
  int references; /* the handle itself, and each mapping */
} physical_memory;

/* CUmemAllocationProp, as far as it is read */
typedef struct {
  int type, handle_types;
  struct {
    int type, id;
  } location;
} allocation_properties;

typedef struct mapping {
  uintptr_t at;
  physical_memory *memory;
  struct mapping *next;
} mapping;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static mapping *mappings;

static void release(physical_memory *memory) {
  if (__atomic_sub_fetch(&memory->references, 1, __ATOMIC_ACQ_REL)) return;
  vgpu_charge(memory->device, -(int64_t)memory->size);
  free(memory);
}

API int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
  *granularity = PAGE_2M;
  return SUCCESS;
}

API int cuMemAddressReserve(void **out, size_t size, size_t alignment, void *wanted, u64 flags) {
  *out = vgpu_map_pages(size, PROT_NONE);
  if (!*out) return ERROR_OUT_OF_MEMORY;
  vgpu_add_region(*out, size, vgpu_current, MEMORY_RESERVED);
  return SUCCESS;
}

API int cuMemAddressFree(void *pointer, size_t size) {
  region freed;
  if (!vgpu_remove_region(pointer, &freed)) return ERROR_INVALID_VALUE;
  munmap(pointer, freed.size);
  return SUCCESS;
}

API int cuMemCreate(physical_memory **out, size_t size, const allocation_properties *properties, u64 flags) {
  int device = properties->location.id;
  if (device < 0 || device >= vgpu_devices()) return ERROR_INVALID_DEVICE;
  if (table_lost(vgpu_table, vgpu_physical(device))) return ERROR_LAUNCH_FAILURE;
  if (vgpu_charge(device, (int64_t)size)) return ERROR_OUT_OF_MEMORY;
  physical_memory *created = calloc(1, sizeof *created);
  created->size = size;
  created->device = device;
  created->references = 1;
  *out = created;
  return SUCCESS;
}

API int cuMemMap(void *at, size_t size, size_t offset, physical_memory *memory, u64 flags) {
  mapping *made = malloc(sizeof *made);
  __atomic_add_fetch(&memory->references, 1, __ATOMIC_ACQ_REL);
  pthread_mutex_lock(&mutex);
  *made = (mapping){(uintptr_t)at, memory, mappings};
  mappings = made;
  pthread_mutex_unlock(&mutex);
  return mprotect(at, size, PROT_READ | PROT_WRITE) ? ERROR_INVALID_VALUE : SUCCESS;
}

API int cuMemSetAccess(void *pointer, size_t size, const void *description, size_t count) { return SUCCESS; }

/* Takes the mappings in the range out of the list; the caller releases them without the lock. */
static mapping *take_mappings(uintptr_t start, uintptr_t end) {
  mapping *taken = 0, **link = &mappings;
  pthread_mutex_lock(&mutex);
  while (*link) {
    mapping *here = *link;
    if (here->at < start || here->at >= end) {
      link = &here->next;
      continue;
    }
    *link = here->next;
    here->next = taken;
    taken = here;
  }
  pthread_mutex_unlock(&mutex);
  return taken;
}

API int cuMemUnmap(void *pointer, size_t size) {
  vgpu_wait_for_range(pointer, size); /* nothing may be written there later */
  madvise(pointer, size, MADV_DONTNEED);
  mprotect(pointer, size, PROT_NONE);
  vgpu_forget_upload(pointer, size);
  for (mapping *taken = take_mappings((uintptr_t)pointer, (uintptr_t)pointer + size), *next; taken; taken = next) {
    next = taken->next;
    release(taken->memory);
    free(taken);
  }
  return SUCCESS;
}

API int cuMemRelease(physical_memory *memory) {
  release(memory);
  return SUCCESS;
}
