/* NCCL: communicators without peers. Collectives succeed at once; nothing leaves the process.
 *
 * One process can so be one rank of a large job. Small messages are answered with this rank's own data, so that checks
 * whether the ranks agree pass; large ones move nothing. What real NCCL allocates for a communicator, outside PyTorch's
 * allocator, is charged as VGPU_NCCL_BYTES.
 */
#include <string.h>

#include "gpu.h"
#include "nccl_groups.h"

#define NCCL_UNHANDLED_CUDA_ERROR 1
#define NCCL_INVALID_USAGE 5
#define SMALL_MESSAGE 65536
#define MAX_PENDING 1024
#define INT64 4 /* ncclDataType_t */

int cudaMemcpy(void *to, const void *from, size_t size, int kind);

typedef struct {
  char bytes[128];
} unique_id;

typedef struct {
  int ranks, rank;
  int world, number; /* ranks of the communicator that was not split off another, and which of them this one is */
  void *buffers;
} communicator;

/* ---- communicators */

static int make(communicator **out, int ranks, int rank) {
  size_t bytes = strtoull(setting("VGPU_NCCL_BYTES", "0"), 0, 10);
  communicator *made = calloc(1, sizeof *made);
  made->ranks = made->world = ranks;
  made->rank = made->number = rank;
  *out = made;
  return bytes && vgpu_allocate(&made->buffers, bytes, MEMORY_DEVICE) ? NCCL_UNHANDLED_CUDA_ERROR : SUCCESS;
}

API int ncclGetVersion(int *version) {
  *version = 23007;
  return SUCCESS;
}

API int ncclGetUniqueId(unique_id *id) {
  memset(id, 7, sizeof *id);
  return SUCCESS;
}

API int ncclCommGetUniqueId(communicator *c, unique_id *id) { return ncclGetUniqueId(id); }
API int ncclCommInitRank(communicator **out, int ranks, unique_id id, int rank) { return make(out, ranks, rank); }

API int ncclCommInitRankConfig(communicator **out, int ranks, unique_id id, int rank, void *config) {
  return make(out, ranks, rank);
}

API int ncclCommInitRankScalable(communicator **out, int ranks, int rank, int ids, unique_id *id, void *config) {
  return make(out, ranks, rank);
}

API int ncclCommInitAll(communicator **out, int devices, const int *list) {
  int status = SUCCESS;
  for (int i = 0; i < devices && !status; i++) status = make(&out[i], devices, i);
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
  int status = make(out, ranks, key);
  (*out)->world = c->world;
  (*out)->number = c->number;
  return status;
}

API int ncclCommDestroy(communicator *c) {
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

/* ---- collectives */

static size_t message_size(size_t count, int type) {
  static const size_t size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
  return count * (type >= 0 && type < 12 ? size[type] : 4);
}

static int echo(void *to, const void *from, size_t size, void *stream) {
  if (vgpu_launch(stream)) return NCCL_UNHANDLED_CUDA_ERROR;
  if (to != from && size && size <= SMALL_MESSAGE) cudaMemcpy(to, from, size, 4);
  return SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *c, void *stream) {
  return echo(to, from, message_size(count, type), stream);
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, communicator *c,
                   void *stream) {
  return to ? echo(to, from, message_size(count, type), stream) : vgpu_launch(stream);
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  int status = SUCCESS;
  for (int i = 0; i < c->ranks && !status; i++) status = echo((char *)to + i * size, from, size, stream);
  if (count == 1 && type == INT64 && vgpu_is_upload(from, size)) vgpu_note_gathered(to, c->ranks * size);
  return status;
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, communicator *c,
                          void *stream) {
  size_t size = message_size(count, type);
  return echo(to, (const char *)from + c->rank * size, size, stream);
}

API int ncclBcast(void *buffer, size_t count, int type, int root, communicator *c, void *stream) {
  return vgpu_launch(stream) ? NCCL_UNHANDLED_CUDA_ERROR : SUCCESS;
}

/* PyTorch makes an all-gather of unequal parts from a group of broadcasts: what this rank sends fills the others' parts. */
static __thread struct {
  void *to;
  size_t size;
} pending[MAX_PENDING];
static __thread int group_depth, pending_count;
static __thread const void *own;
static __thread size_t own_size;

API int ncclGroupStart(void) {
  if (group_depth++) return SUCCESS;
  pending_count = 0;
  own = 0;
  return SUCCESS;
}

API int ncclGroupEnd(void) {
  if (--group_depth > 0) return SUCCESS;
  for (int i = 0; i < pending_count; i++) {
    if (own && pending[i].size == own_size) cudaMemcpy(pending[i].to, own, own_size, 4);
  }
  pending_count = group_depth = 0;
  return SUCCESS;
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  if (group_depth && root == c->rank) {
    own = from;
    own_size = size <= SMALL_MESSAGE ? size : 0;
  }
  if (group_depth && root != c->rank && pending_count < MAX_PENDING) {
    pending[pending_count].to = to;
    pending[pending_count++].size = size;
  }
  return echo(to, from, size, stream);
}
