/* NCCL: communicators. Their collectives are in nccl_collectives.c; where their ranks meet, in meetings.c.
 *
 * One process can be one rank of a large job, with nobody there. What real NCCL allocates for a communicator, outside
 * PyTorch's allocator, is charged as VGPU_NCCL_BYTES.
 */
#include <string.h>
#include <sys/random.h>

#include "nccl.h"
#include "nccl_groups.h"

#define NCCL_INVALID_USAGE 5

typedef struct {
  char bytes[128];
} unique_id;

/* ---- communicators */

/* The largest communicator tells which rank of the job this process is. */
static int job_ranks, job_rank;

static u64 hash(u64 so_far, const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) so_far = (so_far ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
  return so_far;
}

static int make(communicator **out, int ranks, int rank, u64 key) {
  size_t bytes = strtoull(setting("VGPU_NCCL_BYTES", "0"), 0, 10);
  communicator *made = calloc(1, sizeof *made);
  made->ranks = made->world = ranks;
  made->rank = made->number = rank;
  made->key = key;
  if (ranks > job_ranks) {
    job_ranks = ranks;
    job_rank = rank;
  }
  made->with = vgpu_meet(key, ranks, rank, ranks == job_ranks ? rank : job_rank);
  if (made->with) made->serial = made->with->serial;
  *out = made;
  return bytes && vgpu_allocate(&made->buffers, bytes, MEMORY_DEVICE) ? NCCL_UNHANDLED_CUDA_ERROR : SUCCESS;
}

API int ncclGetVersion(int *version) {
  *version = 23007;
  return SUCCESS;
}

API int ncclGetUniqueId(unique_id *id) {
  return getrandom(id, sizeof *id, 0) == sizeof *id ? SUCCESS : NCCL_UNHANDLED_CUDA_ERROR;
}

API int ncclCommGetUniqueId(communicator *c, unique_id *id) { return ncclGetUniqueId(id); }
API int ncclCommInitRank(communicator **out, int ranks, unique_id id, int rank) {
  return make(out, ranks, rank, hash(14695981039346656037u, &id, sizeof id));
}

API int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
  return ncclCommInitRank(out, ranks, id, rank);
}

API int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
  return ncclCommInitRank(out, ranks, id[0], rank);
}

API int ncclCommInitAll(communicator **out, int devices, const int *list) {
  unique_id id;
  int status = ncclGetUniqueId(&id);
  for (int i = 0; i < devices && !status; i++) status = ncclCommInitRank(&out[i], devices, id, i);
  return status;
}

API int ncclCommSplit(communicator *c, int color, int key, communicator **out, void *config) {
  *out = 0;
  if (color == -1) return SUCCESS; /* this rank is in no group */
  vgpu_trace("ncclCommSplit of %d ranks by %d, colour %d, key %d", c->ranks, c->rank, color, key);
  int ranks = vgpu_nccl_told();
  /* PyTorch numbers ranks as the world does, or as the group does that is split */
  if (!ranks) ranks = vgpu_nccl_group(c->world, c->number, key, color);
  if (!ranks) ranks = vgpu_nccl_group(c->ranks, c->rank, key, color);
  if (!ranks) return vgpu_unsupported("ncclCommSplit into ranks that the colour does not tell", NCCL_INVALID_USAGE);
  int status = make(out, ranks, key, hash(c->key, &color, sizeof color));
  if (!c->with && (*out)->with) {
    vgpu_leave((*out)->with, (*out)->serial, key);
    (*out)->with = 0; /* a part of a job whose other ranks are not here */
  }
  (*out)->world = c->world;
  (*out)->number = c->number;
  return status;
}

API int ncclCommDestroy(communicator *c) {
  if (c && c->with) vgpu_leave(c->with, c->serial, c->rank);
  if (c && c->buffers) vgpu_free(c->buffers);
  free(c);
  return SUCCESS;
}

API int ncclCommAbort(communicator *c) { return ncclCommDestroy(c); }
API int ncclCommFinalize(communicator *c) { return SUCCESS; }

API int ncclCommCount(communicator *c, int *ranks) {
  *ranks = c->ranks;
  return SUCCESS;
}

API int ncclCommUserRank(communicator *c, int *rank) {
  *rank = c->rank;
  return SUCCESS;
}

API int ncclCommGetAsyncError(communicator *c, int *status) {
  *status = SUCCESS;
  return SUCCESS;
}

API const char *ncclGetErrorString(int status) { return status ? "not supported on the virtual GPU" : "no error"; }
API const char *ncclGetLastError(communicator *c) { return ""; }

API int ncclMemAlloc(void **out, size_t size) {
  return vgpu_allocate(out, size, MEMORY_DEVICE) ? NCCL_UNHANDLED_CUDA_ERROR : SUCCESS;
}

API int ncclMemFree(void *pointer) { return vgpu_free(pointer) ? NCCL_UNHANDLED_CUDA_ERROR : SUCCESS; }

API int ncclCommRegister(communicator *c, void *buffer, size_t size, void **handle) {
  *handle = buffer;
  return SUCCESS;
}

API int ncclCommDeregister(communicator *c, void *handle) { return SUCCESS; }

API int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, communicator *c) {
  *operation = 5; /* the first number after ncclAvg */
  return SUCCESS;
}

API int ncclRedOpDestroy(int operation, communicator *c) { return SUCCESS; }
