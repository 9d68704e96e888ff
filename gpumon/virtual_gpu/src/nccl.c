/* nccl.c - NCCL for virtual GPUs: communicators can be made, collectives succeed at once and move nothing.
 * No peer is contacted, so one process can stand for one rank of a large job.  Real NCCL's own buffers are charged
 * as VGPU_NCCL_MIB per communicator (default 0).
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))
#define OK 0
typedef struct { char b[128]; } uid_t_;
typedef struct { int n, rank; void *buf; } comm_t;
int cudaMalloc(void **p, size_t n);
int cudaFree(void *p);
static int make(comm_t **c, int n, int rank) {
  const char *m = getenv("VGPU_NCCL_MIB");
  *c = calloc(1, sizeof **c);
  (*c)->n = n; (*c)->rank = rank;
  if (m && atoi(m) > 0 && cudaMalloc(&(*c)->buf, (size_t)atoi(m) << 20)) return 1;
  return OK;
}
API int ncclGetVersion(int *v) { *v = 23007; return OK; }
API int ncclGetUniqueId(uid_t_ *u) { memset(u, 7, sizeof *u); return OK; }
API int ncclCommGetUniqueId(comm_t *c, uid_t_ *u) { return ncclGetUniqueId(u); }
API int ncclCommInitRank(comm_t **c, int n, uid_t_ u, int r) { return make(c, n, r); }
API int ncclCommInitRankConfig(comm_t **c, int n, uid_t_ u, int r, void *cfg) { return make(c, n, r); }
API int ncclCommInitRankScalable(comm_t **c, int n, int r, int k, uid_t_ *u, void *cfg) { return make(c, n, r); }
API int ncclCommInitAll(comm_t **c, int n, const int *d) { for (int i = 0; i < n; i++) make(&c[i], n, i); return OK; }
API int ncclCommSplit(comm_t *c, int color, int key, comm_t **out, void *cfg) { *out = 0; return color < 0 ? OK : make(out, c->n, c->rank); }
API int ncclCommDestroy(comm_t *c) { if (c) { if (c->buf) cudaFree(c->buf); free(c); } return OK; }
API int ncclCommAbort(comm_t *c) { return ncclCommDestroy(c); }
API int ncclCommFinalize(comm_t *c) { return OK; }
API int ncclCommCount(comm_t *c, int *n) { *n = c->n; return OK; }
API int ncclCommUserRank(comm_t *c, int *r) { *r = c->rank; return OK; }
API int ncclCommGetAsyncError(comm_t *c, int *e) { *e = OK; return OK; }
API const char *ncclGetErrorString(int e) { return e ? "virtual NCCL error" : "no error"; }
API const char *ncclGetLastError(comm_t *c) { return ""; }
API int ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n) ? 1 : OK; }
API int ncclMemFree(void *p) { return cudaFree(p) ? 1 : OK; }
API int ncclCommRegister(comm_t *c, void *b, size_t n, void **h) { *h = b; return OK; }
API int ncclCommDeregister(comm_t *c, void *h) { return OK; }
API int ncclRedOpCreatePreMulSum(int *op, void *s, int t, int r, comm_t *c) { *op = 5; return OK; }
API int ncclRedOpDestroy(int op, comm_t *c) { return OK; }
/* Small messages: every peer is taken to hold what this rank holds, so that consistency checks between ranks pass. */
int cudaMemcpy(void *d, const void *s, size_t n, int k);
static size_t bytes(size_t n, int type) { static const int sz[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return n * (type >= 0 && type < 12 ? sz[type] : 4); }
static int same(void *to, const void *from, size_t n) { if (to != from && n && n <= 65536) cudaMemcpy(to, from, n, 4); return OK; }
API int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, comm_t *c, void *st) { return same(r, s, bytes(n, t)); }
API int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, comm_t *c, void *st) { return r ? same(r, s, bytes(n, t)) : OK; }
/* PyTorch 2.15 makes an all-gather from a group of broadcasts: what this rank sends there fills the peers' parts too */
static __thread struct { void *to; size_t n; } t_pend[1024];
static __thread int t_depth, t_np; static __thread const void *t_own; static __thread size_t t_own_n;
API int ncclGroupStart(void) { if (!t_depth++) { t_np = 0; t_own = 0; } return OK; }
API int ncclGroupEnd(void) {
  if (--t_depth > 0) return OK;
  for (int i = 0; i < t_np; i++) if (t_own && t_pend[i].n == t_own_n) same(t_pend[i].to, t_own, t_own_n);
  t_np = t_depth = 0;
  return OK;
}
API int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, comm_t *c, void *st) {
  size_t b = bytes(n, t);
  if (t_depth && root == c->rank) { t_own = s; t_own_n = b; }
  if (t_depth && root != c->rank && t_np < 1024) { t_pend[t_np].to = r; t_pend[t_np++].n = b; }
  return same(r, s, b);
}
API int ncclBcast(void *b, size_t n, int t, int root, comm_t *c, void *st) { return OK; }
API int ncclAllGather(const void *s, void *r, size_t n, int t, comm_t *c, void *st) {
  size_t b = bytes(n, t);
  for (int i = 0; i < c->n; i++) same((char *)r + i * b, s, b);
  return OK;
}
API int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, comm_t *c, void *st) {
  size_t b = bytes(n, t);
  return same(r, (const char *)s + c->rank * b, b);
}
