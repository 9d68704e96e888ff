/* NCCL: collectives and messages, whose bytes are moved where they are small and known.
 *
 * Where the other ranks are processes of this session (meetings.c), each says what it has to say at the call, without
 * waiting, and its stream has to wait for the others (waiting.c). Moved is what is known, up to MESSAGE_MAX: uploads,
 * and what was made of uploads by copies and by other ranks. Of what only kernels have written nothing is moved: those
 * bytes mean nothing, and moving them would make a model's weights resident on the host.
 *
 * One process can also be one rank of a large job, with nobody there. Then, and for bytes that are not known, small
 * messages are answered with this rank's own data, so that checks whether the ranks agree pass.
 */
#include "nccl.h"

#define SMALL_MESSAGE 65536
#define MAX_PENDING 1024

int cudaMemcpy(void *to, const void *from, size_t size, int kind);

static size_t message_size(size_t count, int type) {
  static const size_t size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
  return count * (type >= 0 && type < 12 ? size[type] : 4);
}

static int echo(void *to, const void *from, size_t size, void *stream) {
  if (vgpu_launch(stream)) return NCCL_UNHANDLED_CUDA_ERROR;
  if (to != from && size && size <= SMALL_MESSAGE) cudaMemcpy(to, from, size, 4);
  return SUCCESS;
}

/* Masks of ranks; nobody where the others are not here. */
static unsigned others(const communicator *c) { return c->with ? ((1u << c->ranks) - 1) & ~(1u << c->rank) : 0; }
static unsigned only(const communicator *c, int root) { return c->with ? others(c) & (1u << root) : 0; }

/* What one rank says in a collective or message, to whom, and whose words it waits for. */
typedef struct {
  const void *from;
  size_t size;
  unsigned to;
  receipt receipt;
} part;

static int exchange(communicator *c, part *p, void *stream_handle) {
  stream *queue = vgpu_stream(stream_handle);
  receipt *r = &p->receipt;
  if (!c->with || queue->capturing) return SUCCESS; /* what a graph does when it runs is not known here */
  if (!r->when.is_pair) r->when.number = c->joined_in++;
  r->when.at = c->with;
  r->when.serial = c->serial;
  r->rank = c->rank;
  size_t known = 0;
  if (p->size && p->size <= MESSAGE_MAX) {
    vgpu_wait_for_range(p->from, p->size); /* it may be what another rank has yet to say */
    known = vgpu_known_bytes(p->from, p->size);
  }
  if (!r->when.is_pair || p->to) vgpu_say(&r->when, c->rank, p->to, p->from, known);
  if (!r->from) return SUCCESS;
  size_t all = r->part * (r->is_spread ? c->ranks : 1);
  if (r->part > MESSAGE_MAX || (r->is_reduction && known < p->size) || (r->takes_own && !known)) r->to = 0;
  r->own = p->from;
  r->own_size = r->to && (r->is_reduction || r->takes_own) ? known : 0;
  if (r->to) vgpu_note_message(r->to, all); /* whoever reads it waits; what has come tells whether it is known */
  vgpu_await(r, queue);
  return SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  receipt r = {.from = others(c), .to = to, .part = size, .type = type, .operation = operation, .is_reduction = 1};
  int status = echo(to, from, size, stream);
  return status ? status : exchange(c, &(part){from, size, others(c), r}, stream);
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, communicator *c,
                   void *stream) {
  size_t size = message_size(count, type);
  receipt r = {.to = to, .part = size, .type = type, .operation = operation, .is_reduction = 1};
  if (root == c->rank) r.from = others(c);
  int status = to ? echo(to, from, size, stream) : vgpu_launch(stream);
  return status ? status : exchange(c, &(part){from, size, only(c, root), r}, stream);
}

/* This rank's own part for each rank, before theirs come. */
static int echo_for_all(void *to, const void *from, size_t size, communicator *c, void *stream) {
  int status = SUCCESS, known = size <= SMALL_MESSAGE && vgpu_is_upload(from, size);
  for (int i = 0; i < c->ranks && !status; i++) status = echo((char *)to + i * size, from, size, stream);
  if (known) vgpu_note_message(to, c->ranks * size); /* one range, where each was one of its own */
  return status;
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  receipt r = {.from = others(c), .takes_own = 1, .to = to, .part = size, .is_spread = 1};
  int status = echo_for_all(to, from, size, c, stream);
  return status ? status : exchange(c, &(part){from, size, others(c), r}, stream);
}

API int ncclGather(const void *from, void *to, size_t count, int type, int root, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  int receives = root == c->rank, status = receives ? echo_for_all(to, from, size, c, stream) : vgpu_launch(stream);
  receipt r = {.from = receives ? others(c) : 0, .takes_own = 1, .to = to, .part = size, .is_spread = 1};
  return status ? status : exchange(c, &(part){from, size, only(c, root), r}, stream);
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, communicator *c,
                          void *stream) {
  size_t size = message_size(count, type);
  receipt r = {.from = others(c), .to = to, .part = size, .type = type, .operation = operation, .is_reduction = 1};
  r.offset = c->rank * size;
  int status = echo(to, (const char *)from + c->rank * size, size, stream);
  return status ? status : exchange(c, &(part){from, c->ranks * size, others(c), r}, stream);
}

API int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *c, void *stream) {
  size_t size = message_size(count, type);
  receipt r = {.from = others(c), .takes_own = 1, .to = to, .part = size, .offset = c->rank * size, .is_spread = 1};
  int status = vgpu_launch(stream);
  return status ? status : exchange(c, &(part){from, c->ranks * size, others(c), r}, stream);
}

static int broadcast(const void *from, void *to, size_t size, int root, communicator *c, void *stream) {
  if (root == c->rank) return exchange(c, &(part){.from = from, .size = size, .to = others(c)}, stream);
  return exchange(c, &(part){.receipt = {.from = only(c, root), .to = to, .part = size}}, stream);
}

API int ncclBcast(void *buffer, size_t count, int type, int root, communicator *c, void *stream) {
  int status = vgpu_launch(stream);
  return status ? status : broadcast(buffer, buffer, message_size(count, type), root, c, stream);
}

/* With nobody there: PyTorch makes an all-gather of unequal parts from a group of broadcasts, and what this rank sends
 * fills the others' parts. */
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
  if (group_depth && root == c->rank && !c->with) {
    own = from;
    own_size = size <= SMALL_MESSAGE ? size : 0;
  }
  if (group_depth && root != c->rank && !c->with && pending_count < MAX_PENDING) {
    pending[pending_count].to = to;
    pending[pending_count++].size = size;
  }
  int status = echo(to, from, size, stream);
  return status ? status : broadcast(from, to, size, root, c, stream);
}

/* ---- messages between two ranks */

API int ncclSend(const void *from, size_t count, int type, int peer, communicator *c, void *stream) {
  int status = vgpu_launch(stream);
  if (status || !c->with) return status;
  receipt r = {.when = {.is_pair = 1}};
  if (!vgpu_stream(stream)->capturing) r.when.number = c->sent[peer]++;
  return exchange(c, &(part){from, message_size(count, type), 1u << peer, r}, stream);
}

API int ncclRecv(void *to, size_t count, int type, int peer, communicator *c, void *stream) {
  int status = vgpu_launch(stream);
  if (status || !c->with) return status;
  receipt r = {.when = {.is_pair = 1}, .from = 1u << peer, .to = to, .part = message_size(count, type)};
  if (!vgpu_stream(stream)->capturing) r.when.number = c->received[peer]++;
  return exchange(c, &(part){.receipt = r}, stream);
}
