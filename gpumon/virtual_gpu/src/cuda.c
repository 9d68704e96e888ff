/* cuda.c - a virtual GPU for LD_PRELOAD: enough of the CUDA runtime (plus a few driver calls and
 * cuBLAS / cuBLASLt) for an unmodified CUDA build of PyTorch to run on device "cuda" without a GPU.
 *
 * Memory management is real (capacity limits, addresses, out-of-memory, per-process accounting shared
 * through table.h); kernels and GEMMs are no-ops.  Device memory is lazily backed host memory, so
 * small copies really carry data and 80 GB of untouched device memory costs nothing.
 *
 * Needs no CUDA headers: the ABI facts it relies on are declared here (see check_abi.c).
 */
#define _GNU_SOURCE
#include "table.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stddef.h>

#ifndef VGPU_CUDA_VERSION
#define VGPU_CUDA_VERSION 13020
#endif
#include "abi.h"
#define API __attribute__((visibility("default")))
enum { OK = 0, E_INVALID = 1, E_OOM = 2, E_NODEVICE = 100, E_BADDEV = 101, E_PEER_ON = 704, E_NOTSUP = 801,
       DRV_NOTFOUND = 500 };
enum { MEM_HOST = 1, MEM_DEVICE = 2, MEM_MANAGED = 3, MEM_RESERVED = 9 };   /* first three as in CUDA */
#define PAGE2M (2 * MIB)

typedef unsigned long long u64;
typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { int dev, prio; unsigned flags; int capturing; u64 capture_id; } stream_t;
typedef struct { int dev; unsigned flags; struct timespec ts; int recorded; } event_t;

/* ---------------------------------------------------------------- state */
static vg_shm *S;
static int g_ndev, g_map[VG_MAXDEV];              /* CUDA ordinal -> device of the shared table */
static vg_proc *g_slot;
static int g_pid, g_trace, g_zero_d2h, g_inited;
static int64_t g_copy_max, g_d2d_max;
static pthread_mutex_t g_mu = PTHREAD_MUTEX_INITIALIZER;
static __thread int t_dev, t_err;
static u64 g_capture_ids = 1;

static void trace(const char *fmt, ...) {
  if (!g_trace) return;
  va_list ap; va_start(ap, fmt);
  fputs("[vgpu] ", stderr); vfprintf(stderr, fmt, ap); fputc('\n', stderr);
  va_end(ap);
}
static int fail(int e) { t_err = e; return e; }

static void at_exit(void) {
  if (S && g_slot && g_pid == getpid()) { vg_lock(S); memset(g_slot, 0, sizeof *g_slot); vg_unlock(S); }
}
static void in_child(void) { g_slot = 0; g_pid = getpid(); pthread_mutex_init(&g_mu, 0); }

static void init_locked(void) {
  if (g_inited) return;
  g_inited = 1;
  g_trace = atoi(vg_env("VGPU_TRACE", "0"));
  g_zero_d2h = !strcmp(vg_env("VGPU_D2H", "copy"), "zero");
  g_copy_max = atoll(vg_env("VGPU_COPY_MAX", "67108864"));
  g_d2d_max = atoll(vg_env("VGPU_D2D_MAX", "65536"));
  g_pid = getpid();
  S = vg_open(1);
  if (!S) { fprintf(stderr, "[vgpu] cannot open the shared table: %s\n", strerror(errno)); return; }
  const char *vis = getenv("CUDA_VISIBLE_DEVICES");
  if (!vis) for (int i = 0; i < S->ndev; i++) g_map[g_ndev++] = i;
  else for (const char *p = vis; *p && g_ndev < VG_MAXDEV;) {
    char *e; long d = strtol(p, &e, 10);
    if (e == p) { if (sscanf(p, "GPU-%8lx", (unsigned long *)&d) != 1) break; d -= 0x56470000; e = (char *)p + strcspn(p, ","); }
    if (d < 0 || d >= S->ndev) break;
    g_map[g_ndev++] = (int)d;
    p = *e == ',' ? e + 1 : e;
  }
  pthread_atfork(0, 0, in_child);
  atexit(at_exit);
}
static int init(void) {
  if (!g_inited) { pthread_mutex_lock(&g_mu); init_locked(); pthread_mutex_unlock(&g_mu); }
  return S ? g_ndev : 0;
}
static vg_proc *slot(void) {            /* this process' slot; call with the shared lock held */
  if (g_slot) return g_slot;
  vg_reap(S);
  for (int i = 0; i < VG_MAXPROC; i++) if (!S->proc[i].pid) {
    memset(&S->proc[i], 0, sizeof S->proc[i]);
    S->proc[i].start = vg_starttime(getpid());
    S->proc[i].pid = getpid();
    return g_slot = &S->proc[i];
  }
  return 0;
}
/* charge or release device memory; the first touch of a device also pays for its context */
static int charge(int dev, int64_t bytes) {
  int p = g_map[dev], rc = E_OOM;
  vg_lock(S);
  vg_proc *me = slot();
  if (me) {
    uint64_t need = (bytes > 0 ? bytes : 0) + (me->ctx_on[p] ? 0 : S->ctx_bytes);
    if (need) vg_reap(S);
    if (!need || vg_dev_used(S, p) + need <= S->dev[p].total) {
      if (!me->ctx_on[p]) {
        me->ctx_on[p] = 1; me->ctx[p] = S->ctx_bytes;
        if (g_trace > 1) { void *bt[24]; trace("pid %d: context on device %d created by", getpid(), p); backtrace_symbols_fd(bt, backtrace(bt, 24), 2); }
      }
      me->used[p] += bytes;
      if (me->used[p] > me->peak[p]) me->peak[p] = me->used[p];
      rc = OK;
    }
  }
  vg_unlock(S);
  return rc;
}
static int ensure_ctx(void) {
  if (t_dev >= init()) return fail(E_NODEVICE);
  if ((!g_slot || !g_slot->ctx_on[g_map[t_dev]]) && charge(t_dev, 0)) return fail(E_OOM);
  return OK;
}

/* ---------------------------------------------------------------- allocation table (sorted by address) */
typedef struct { uintptr_t base; size_t size; int dev, kind; } region;
static region *R; static size_t nR, capR;

static size_t lower(uintptr_t p) {      /* first region with base > p */
  size_t lo = 0, hi = nR;
  while (lo < hi) { size_t m = (lo + hi) / 2; if (R[m].base <= p) lo = m + 1; else hi = m; }
  return lo;
}
static void add_region(void *p, size_t size, int dev, int kind) {
  pthread_mutex_lock(&g_mu);
  if (nR == capR) R = realloc(R, (capR = capR ? capR * 2 : 256) * sizeof *R);
  size_t i = lower((uintptr_t)p);
  memmove(R + i + 1, R + i, (nR - i) * sizeof *R);
  R[i] = (region){(uintptr_t)p, size, dev, kind}; nR++;
  pthread_mutex_unlock(&g_mu);
}
static int find_region(const void *p, region *out) {
  int hit = 0;
  pthread_mutex_lock(&g_mu);
  size_t i = lower((uintptr_t)p);
  if (i && (uintptr_t)p < R[i - 1].base + R[i - 1].size) { *out = R[i - 1]; hit = 1; }
  pthread_mutex_unlock(&g_mu);
  return hit;
}
static int del_region(const void *p, region *out) {
  int hit = 0;
  pthread_mutex_lock(&g_mu);
  size_t i = lower((uintptr_t)p);
  if (i && R[i - 1].base == (uintptr_t)p) {
    *out = R[i - 1]; hit = 1;
    memmove(R + i - 1, R + i, (nR - i) * sizeof *R); nR--;
  }
  pthread_mutex_unlock(&g_mu);
  return hit;
}
static int is_dev(const void *p, int *dev) {
  region r;
  if (!find_region(p, &r) || (r.kind != MEM_DEVICE && r.kind != MEM_RESERVED)) return 0;
  if (dev) *dev = r.dev;
  return 1;
}
static size_t up(size_t n, size_t a) { return (n + a - 1) / a * a; }
static void *map_pages(size_t size, int prot) {       /* 2 MiB aligned, never committed in advance */
  size_t n = size + PAGE2M;
  char *raw = mmap(0, n, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return 0;
  char *p = (char *)up((size_t)raw, PAGE2M);
  if (p > raw) munmap(raw, p - raw);
  if (raw + n > p + size) munmap(p + size, raw + n - (p + size));
  return p;
}
static int dev_alloc(void **out, size_t n, int kind) {
  *out = 0;
  if (t_dev >= init()) return fail(E_NODEVICE);
  if (!n) return OK;
  size_t size = up(n, PAGE2M);
  if (size < n || charge(t_dev, size)) return fail(E_OOM);
  void *p = map_pages(size, PROT_READ | PROT_WRITE);
  if (!p) { charge(t_dev, -(int64_t)size); return fail(E_OOM); }
  madvise(p, size, MADV_NOHUGEPAGE);
  add_region(p, size, t_dev, kind);
  *out = p;
  return OK;
}
static int dev_free(void *p) {
  region r;
  if (!p) return ensure_ctx();
  if (!del_region(p, &r)) return fail(E_INVALID);
  munmap((void *)r.base, r.size);
  charge(r.dev, -(int64_t)r.size);
  return OK;
}

/* ---------------------------------------------------------------- errors, versions */
API int cudaGetLastError(void) { int e = t_err; t_err = 0; return e; }
API int cudaPeekAtLastError(void) { return t_err; }
API const char *cudaGetErrorName(int e) {
  switch (e) {
    case OK: return "cudaSuccess"; case E_INVALID: return "cudaErrorInvalidValue";
    case E_OOM: return "cudaErrorMemoryAllocation"; case E_NODEVICE: return "cudaErrorNoDevice";
    case E_BADDEV: return "cudaErrorInvalidDevice"; case E_PEER_ON: return "cudaErrorPeerAccessAlreadyEnabled";
    case E_NOTSUP: return "cudaErrorNotSupported"; default: return "cudaErrorUnknown";
  }
}
API const char *cudaGetErrorString(int e) {
  switch (e) {
    case OK: return "no error"; case E_INVALID: return "invalid argument"; case E_OOM: return "out of memory";
    case E_NODEVICE: return "no CUDA-capable device is detected"; case E_BADDEV: return "invalid device ordinal";
    case E_NOTSUP: return "operation not supported (virtual GPU)"; default: return "unknown error (virtual GPU)";
  }
}
API int cudaRuntimeGetVersion(int *v) { *v = VGPU_CUDA_VERSION; return OK; }
API int cudaDriverGetVersion(int *v) { *v = VGPU_CUDA_VERSION; return OK; }

/* ---------------------------------------------------------------- devices */
API int cudaGetDeviceCount(int *n) { *n = init(); return *n ? OK : fail(E_NODEVICE); }
API int cudaGetDevice(int *d) { *d = t_dev; return init() ? OK : fail(E_NODEVICE); }
API int cudaSetDevice(int d) { if (d < 0 || d >= init()) return fail(E_BADDEV); t_dev = d; return ensure_ctx(); }
API int cudaDeviceSynchronize(void) { return ensure_ctx(); }
API int cudaDeviceReset(void) { return OK; }
API int cudaDeviceGetStreamPriorityRange(int *lo, int *hi) { if (lo) *lo = 0; if (hi) *hi = -5; return OK; }
API int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
API int cudaDeviceEnablePeerAccess(int d, unsigned f) { return OK; }
API int cudaDeviceDisablePeerAccess(int d) { return OK; }
API int cudaDeviceGetPCIBusId(char *s, int n, int d) {
  if (d < 0 || d >= init()) return fail(E_BADDEV);
  snprintf(s, n, "0000:%02X:00.0", g_map[d] + 1);
  return OK;
}
static void fill_uuid(char *u, int phys) {      /* GPU-5647000<phys>-... : parseable in CUDA_VISIBLE_DEVICES */
  memset(u, 0, 16); u[0] = 0x56; u[1] = 0x47; u[3] = (char)phys; u[15] = 1;
}
API int cudaGetDeviceProperties(prop_t *p, int d) {
  if (d < 0 || d >= init()) return fail(E_BADDEV);
  vg_dev *v = &S->dev[g_map[d]];
  memset(p, 0, sizeof *p);
  strcpy(p->name, v->name); fill_uuid(p->uuid, g_map[d]);
  p->totalGlobalMem = v->total; p->sharedMemPerBlock = 48 << 10; p->regsPerBlock = 65536; p->warpSize = 32;
  p->memPitch = 0x7fffffff; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536; p->major = v->major; p->minor = v->minor; p->textureAlignment = 512; p->texturePitchAlignment = 32;
  p->multiProcessorCount = v->sms; p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = 1;
  p->surfaceAlignment = 512; p->pciBusID = g_map[d] + 1; p->asyncEngineCount = 3; p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120; p->l2CacheSize = v->l2_mib << 20;
  p->maxThreadsPerMultiProcessor = (v->major * 10 + v->minor == 89) ? 1536 : v->major * 10 + v->minor == 75 ? 1024 : 2048;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = v->smem_sm_kib << 10; p->regsPerMultiprocessor = 65536; p->managedMemory = 1;
  p->concurrentManagedAccess = p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = v->smem_optin_kib << 10; p->maxBlocksPerMultiProcessor = 32; p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  return OK;
}
API int cudaGetDeviceProperties_v2(prop_t *p, int d) { return cudaGetDeviceProperties(p, d); }
API int cudaDeviceGetAttribute(int *v, int a, int d) {
  static __thread prop_t p;
  int e = cudaGetDeviceProperties(&p, d);
  if (e) return e;
  switch (a) {
    case 1: *v = p.maxThreadsPerBlock; break;  case 2: case 3: *v = 1024; break;  case 4: *v = 64; break;
    case 5: *v = 0x7fffffff; break;  case 6: case 7: *v = 65535; break;
    case 8: *v = p.sharedMemPerBlock; break;  case 9: *v = 65536; break;  case 10: *v = 32; break;
    case 12: *v = 65536; break;  case 13: *v = 1410000; break;  case 14: *v = 512; break;
    case 16: *v = p.multiProcessorCount; break;  case 19: case 31: case 32: case 41: *v = 1; break;
    case 33: *v = p.pciBusID; break;  case 36: *v = 1215000; break;  case 37: *v = p.memoryBusWidth; break;
    case 38: *v = p.l2CacheSize; break;  case 39: *v = p.maxThreadsPerMultiProcessor; break;  case 40: *v = 3; break;
    case 75: *v = p.major; break;  case 76: *v = p.minor; break;  case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95: *v = 1; break;
    case 81: *v = p.sharedMemPerMultiprocessor; break;  case 82: *v = 65536; break;
    case 97: *v = p.sharedMemPerBlockOptin; break;  case 99: case 102: case 115: *v = 1; break;  /* VMM, pools */
    case 106: *v = 32; break;  case 111: *v = 1024; break;
    default: *v = 0;
  }
  return OK;
}
API int cudaMemGetInfo(size_t *freeb, size_t *total) {
  int e = ensure_ctx();
  if (e) return e;
  int p = g_map[t_dev];
  vg_lock(S);
  vg_reap(S);
  uint64_t u = vg_dev_used(S, p), t = S->dev[p].total;
  vg_unlock(S);
  if (freeb) *freeb = u < t ? t - u : 0;
  if (total) *total = t;
  return OK;
}

/* ---------------------------------------------------------------- memory */
API int cudaMalloc(void **p, size_t n) { return dev_alloc(p, n, MEM_DEVICE); }
API int cudaMallocManaged(void **p, size_t n, unsigned f) { return dev_alloc(p, n, MEM_MANAGED); }
API int cudaFree(void *p) { return dev_free(p); }
API int cudaMallocAsync(void **p, size_t n, void *s) { return dev_alloc(p, n, MEM_DEVICE); }
API int cudaFreeAsync(void *p, void *s) { return dev_free(p); }
API int cudaHostAlloc(void **p, size_t n, unsigned f) {
  size_t size = up(n ? n : 1, 4096);
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) { *p = 0; return fail(E_OOM); }
  add_region(*p, size, t_dev, MEM_HOST);
  return OK;
}
API int cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
API int cudaFreeHost(void *p) { region r; if (p && del_region(p, &r)) munmap(p, r.size); return OK; }
API int cudaHostRegister(void *p, size_t n, unsigned f) { add_region(p, n, t_dev, MEM_HOST); return OK; }
API int cudaHostUnregister(void *p) { region r; return del_region(p, &r) ? OK : fail(E_INVALID); }
API int cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; return OK; }

API int cudaPointerGetAttributes(ptrattr_t *a, const void *p) {
  region r;
  memset(a, 0, sizeof *a);
  if (!find_region(p, &r)) { a->type = 0; a->device = -2; a->hostPointer = (void *)p; return OK; }
  a->type = r.kind == MEM_RESERVED ? MEM_DEVICE : r.kind; a->device = r.dev; a->devicePointer = (void *)p;
  if (r.kind == MEM_HOST || r.kind == MEM_MANAGED) a->hostPointer = (void *)p;
  return OK;
}
/* Copies move real bytes, up to a limit: there is nothing worth copying in memory no kernel ever writes. */
static int copy(void *dst, const void *src, size_t n) {
  int ddst = is_dev(dst, 0), dsrc = is_dev(src, 0);
  int64_t max = ddst && dsrc ? g_d2d_max : g_copy_max;
  size_t m = max >= 0 && n > (size_t)max ? (size_t)max : n;
  if (dsrc && !ddst && g_zero_d2h) memset(dst, 0, m);
  else memmove(dst, src, m);
  return OK;
}
API int cudaMemcpy(void *d, const void *s, size_t n, int k) { return n ? copy(d, s, n) : OK; }
API int cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *st) { return n ? copy(d, s, n) : OK; }
API int cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, void *st) { return n ? copy(d, s, n) : OK; }
API int cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, int k, void *st) {
  if (w * h > (size_t)g_d2d_max && is_dev(d, 0) && is_dev(s, 0)) return OK;
  for (size_t i = 0; i < h; i++) copy((char *)d + i * dp, (const char *)s + i * sp, w);
  return OK;
}
static int fill(void *p, int v, size_t n) {
  if (n < PAGE2M) { memset(p, v, n); return OK; }
  if (v) { memset(p, v, 4096); return OK; }
  char *a = (char *)up((size_t)p, 4096), *b = (char *)((size_t)((char *)p + n) & ~(size_t)4095);
  memset(p, 0, a - (char *)p);
  memset(b, 0, (char *)p + n - b);
  return madvise(a, b - a, MADV_DONTNEED) ? fail(E_INVALID) : OK;     /* anonymous pages read back as zero */
}
API int cudaMemset(void *p, int v, size_t n) { return fill(p, v, n); }
API int cudaMemsetAsync(void *p, int v, size_t n, void *st) { return fill(p, v, n); }
API int cudaMemcpyToSymbol(const void *sym, const void *src, size_t n, size_t off, int k) { return OK; }
API int cudaGetSymbolAddress(void **p, const void *sym) {      /* __device__ variables: a scratch page per symbol */
  static struct { const void *sym; void *mem; } tab[256]; static int nt;
  pthread_mutex_lock(&g_mu);
  int i = 0;
  while (i < nt && tab[i].sym != sym) i++;
  if (i == nt && nt < 256) { tab[nt].sym = sym; tab[nt++].mem = map_pages(PAGE2M, PROT_READ | PROT_WRITE); }
  pthread_mutex_unlock(&g_mu);
  *p = i < 256 ? tab[i].mem : 0;
  return *p ? OK : fail(E_INVALID);
}
/* stream ordered pools: enough for PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync */
static int g_pool[VG_MAXDEV];
API int cudaDeviceGetDefaultMemPool(void **pool, int d) { *pool = &g_pool[d]; return OK; }
API int cudaMemPoolSetAttribute(void *pool, int a, void *v) { return OK; }
API int cudaMemPoolGetAttribute(void *pool, int a, void *v) {
  int d = (int)((int *)pool - g_pool);
  u64 cur = 0, hi = 0;
  if (S && g_slot && d >= 0 && d < g_ndev) { cur = g_slot->used[g_map[d]]; hi = g_slot->peak[g_map[d]]; }
  if (a <= 3) *(int *)v = 1; else *(u64 *)v = a == 5 || a == 7 ? cur : a == 6 || a == 8 ? hi : 0;
  return OK;
}
API int cudaMemPoolSetAccess(void *pool, const void *d, size_t n) { return OK; }
API int cudaMemPoolTrimTo(void *pool, size_t n) { return OK; }
API int cudaDeviceGetGraphMemAttribute(int d, int a, void *v) { *(u64 *)v = 0; return OK; }
API int cudaDeviceSetGraphMemAttribute(int d, int a, void *v) { return OK; }

/* ---------------------------------------------------------------- streams, events, capture */
static stream_t g_null[VG_MAXDEV];
static stream_t *str(void *s) { return (uintptr_t)s <= 2 ? &g_null[t_dev] : (stream_t *)s; }
API int cudaStreamCreateWithPriority(void **s, unsigned f, int prio) {
  int e = ensure_ctx();
  if (e) return e;
  stream_t *n = calloc(1, sizeof *n);
  n->dev = t_dev; n->flags = f; n->prio = prio;
  *s = n;
  return OK;
}
API int cudaStreamCreateWithFlags(void **s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API int cudaStreamDestroy(void *s) { if ((uintptr_t)s > 2) free(s); return OK; }
API int cudaStreamGetPriority(void *s, int *p) { *p = str(s)->prio; return OK; }
API int cudaStreamGetFlags(void *s, unsigned *f) { *f = str(s)->flags; return OK; }
API int cudaStreamGetDevice(void *s, int *d) { *d = (uintptr_t)s <= 2 ? t_dev : str(s)->dev; return OK; }
API int cudaStreamGetId(void *s, u64 *id) { *id = (u64)(uintptr_t)s; return OK; }
API int cudaStreamQuery(void *s) { return OK; }
API int cudaStreamSynchronize(void *s) { return OK; }
API int cudaStreamWaitEvent(void *s, void *e, unsigned f) { return OK; }
API int cudaStreamAddCallback(void *s, void (*f)(void *, int, void *), void *arg, unsigned fl) { f(s, OK, arg); return OK; }
API int cudaLaunchHostFunc(void *s, void (*f)(void *), void *arg) { f(arg); return OK; }
API int cudaStreamIsCapturing(void *s, int *st) { *st = str(s)->capturing; return OK; }
API int cudaStreamGetCaptureInfo(void *s, int *st, u64 *id, void **g, const void **deps, const void **edges, size_t *n) {
  stream_t *t = str(s);
  *st = t->capturing;
  if (id) *id = t->capture_id;
  if (g) *g = t->capturing ? (void *)t : 0;
  if (deps) *deps = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  return OK;
}
API int cudaStreamGetCaptureInfo_v2(void *s, int *st, u64 *id, void **g, const void **deps, size_t *n) {   /* CUDA 12 */
  return cudaStreamGetCaptureInfo(s, st, id, g, deps, 0, n);
}
API int cudaStreamBeginCapture(void *s, int mode) {
  stream_t *t = str(s);
  t->capturing = 1; t->capture_id = __atomic_fetch_add(&g_capture_ids, 1, __ATOMIC_RELAXED);
  return OK;
}
API int cudaStreamBeginCaptureToGraph(void *s, void *g, const void *d, const void *e, size_t n, int m) { return cudaStreamBeginCapture(s, m); }
API int cudaStreamEndCapture(void *s, void **g) { str(s)->capturing = 0; if (g) *g = calloc(1, 16); return OK; }
API int cudaStreamUpdateCaptureDependencies(void *s, void *d, const void *e, size_t n, unsigned f) { return OK; }
API int cudaThreadExchangeStreamCaptureMode(int *m) { static __thread int cur; int o = cur; cur = *m; *m = o; return OK; }
API int cudaGraphCreate(void **g, unsigned f) { *g = calloc(1, 16); return OK; }
API int cudaGraphDestroy(void *g) { return OK; }
API int cudaGraphInstantiate(void **e, void *g, u64 f) { *e = calloc(1, 16); return OK; }
API int cudaGraphInstantiateWithFlags(void **e, void *g, u64 f) { return cudaGraphInstantiate(e, g, f); }
API int cudaGraphExecDestroy(void *e) { free(e); return OK; }
API int cudaGraphLaunch(void *e, void *s) { return OK; }
API int cudaGraphGetNodes(void *g, void **nodes, size_t *n) { *n = 0; return OK; }
API int cudaGraphNodeGetDependencies(void *n, void *d, void *e, size_t *c) { *c = 0; return OK; }
API int cudaGraphRetainUserObject(void *g, void *o, unsigned n, unsigned f) { return OK; }
API int cudaUserObjectCreate(void **o, void *p, void *d, unsigned n, unsigned f) { *o = p; return OK; }
API int cudaUserObjectRelease(void *o, unsigned n) { return OK; }

API int cudaEventCreateWithFlags(void **e, unsigned f) {
  int rc = ensure_ctx();
  if (rc) return rc;
  event_t *n = calloc(1, sizeof *n);
  n->dev = t_dev; n->flags = f;
  *e = n;
  return OK;
}
API int cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
API int cudaEventDestroy(void *e) { free(e); return OK; }
API int cudaEventRecord(void *e, void *s) { event_t *v = e; v->recorded = 1; if (!(v->flags & 2)) clock_gettime(CLOCK_MONOTONIC, &v->ts); return OK; }
API int cudaEventRecordWithFlags(void *e, void *s, unsigned f) { return cudaEventRecord(e, s); }
API int cudaEventQuery(void *e) { return OK; }
API int cudaEventSynchronize(void *e) { return OK; }
API int cudaEventElapsedTime(float *ms, event_t *a, event_t *b) {
  if (!a->recorded || !b->recorded) return fail(E_INVALID);
  *ms = (b->ts.tv_sec - a->ts.tv_sec) * 1e3f + (b->ts.tv_nsec - a->ts.tv_nsec) * 1e-6f;
  return OK;
}
API int cudaProfilerStart(void) { return OK; }
API int cudaProfilerStop(void) { return OK; }

/* ---------------------------------------------------------------- kernels: registered, configured, never run */
static int launched(void) {
  if (t_dev < init() && g_slot) __atomic_fetch_add(&g_slot->launches[g_map[t_dev]], 1, __ATOMIC_RELAXED);
  return OK;
}
static __thread struct { dim3_t g, b; size_t sm; void *st; } t_cfg;
API void **__cudaRegisterFatBinary(void *b) { static void *h[1]; return h; }
API void __cudaRegisterFatBinaryEnd(void **h) {}
API void __cudaUnregisterFatBinary(void **h) {}
API void __cudaRegisterFunction(void **h, const char *f, char *df, const char *name, int tl, void *a, void *b, void *c, void *d, int *e) {}
API void __cudaRegisterVar(void **h, char *hv, char *da, const char *n, int ext, size_t sz, int c, int g) {}
API void __cudaRegisterManagedVar(void **h, void **hv, char *da, const char *n, int ext, size_t sz, int c, int g) {}
API char __cudaInitModule(void **h) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3_t g, dim3_t b, size_t sm, void *st) { t_cfg.g = g; t_cfg.b = b; t_cfg.sm = sm; t_cfg.st = st; return 0; }
API int __cudaPopCallConfiguration(dim3_t *g, dim3_t *b, size_t *sm, void **st) { *g = t_cfg.g; *b = t_cfg.b; *sm = t_cfg.sm; *st = t_cfg.st; return OK; }
API int __cudaGetKernel(const void **k, const void *f) { *k = f; return OK; }
API int __cudaLaunchKernel(const void *k, dim3_t g, dim3_t b, void **a, size_t sm, void *s) { return launched(); }
API int cudaLaunchKernel(const void *k, dim3_t g, dim3_t b, void **a, size_t sm, void *s) { return launched(); }
API int cudaLaunchCooperativeKernel(const void *k, dim3_t g, dim3_t b, void **a, size_t sm, void *s) { return launched(); }
API int cudaLaunchKernelExC(const void *cfg, const void *f, void **a) { return launched(); }
API int cudaFuncSetAttribute(const void *f, int a, int v) { return OK; }
API int cudaFuncSetCacheConfig(const void *f, int c) { return OK; }
API int cudaKernelSetAttributeForDevice(const void *f, int a, int v, int d) { return OK; }
API int cudaFuncGetAttributes(funcattr_t *a, const void *f) {
  if (t_dev >= init()) return fail(E_NODEVICE);
  vg_dev *v = &S->dev[g_map[t_dev]];
  memset(a, 0, sizeof *a);
  a->maxThreads = 1024; a->regs = 32; a->ptx = a->bin = v->major * 10 + v->minor; a->maxDyn = 48 << 10;
  return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int bs, size_t sm) {
  int k = bs > 0 ? 2048 / bs : 1;
  *n = k < 1 ? 1 : k > 32 ? 32 : k;
  return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int bs, size_t sm, unsigned fl) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, bs, sm);
}

/* ---------------------------------------------------------------- driver API subset (this library is also libcuda.so.1) */
static int g_ctx[VG_MAXDEV];
API int cuInit(unsigned f) { return init() ? OK : E_NODEVICE; }
API int cuDriverGetVersion(int *v) { *v = VGPU_CUDA_VERSION; return OK; }
API int cuGetErrorString(int e, const char **s) { *s = cudaGetErrorString(e); return OK; }
API int cuGetErrorName(int e, const char **s) { *s = e == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : e ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS"; return OK; }
API int cuDeviceGetCount(int *n) { *n = init(); return OK; }
API int cuDeviceGet(int *d, int i) { *d = i; return i < init() ? OK : E_BADDEV; }
API int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }
API int cuDeviceGetUuid(char *u, int d) { fill_uuid(u, g_map[d]); return OK; }
API int cuDeviceGetUuid_v2(char *u, int d) { return cuDeviceGetUuid(u, d); }
API int cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "%s", S->dev[g_map[d]].name); return OK; }
API int cuDeviceTotalMem_v2(size_t *n, int d) { *n = S->dev[g_map[d]].total; return OK; }
API int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) {
  if (d >= init()) return E_BADDEV;
  if (f) *f = 0;
  *active = g_slot && g_slot->ctx_on[g_map[d]];
  return OK;
}
API int cuDevicePrimaryCtxRetain(void **c, int d) { int o = t_dev; t_dev = d; ensure_ctx(); t_dev = o; *c = &g_ctx[d]; return OK; }
API int cuDevicePrimaryCtxRelease_v2(int d) { return OK; }
API int cuCtxGetCurrent(void **c) { *c = g_slot && g_slot->ctx_on[g_map[t_dev]] ? &g_ctx[t_dev] : 0; return OK; }
API int cuCtxSetCurrent(void *c) { if (c) t_dev = (int)((int *)c - g_ctx); return OK; }
API int cuCtxPushCurrent(void *c) { return cuCtxSetCurrent(c); }
API int cuCtxPopCurrent(void **c) { return c ? cuCtxGetCurrent(c) : OK; }
API int cuCtxGetDevice(int *d) { *d = t_dev; return OK; }
API int cuStreamGetCtx(void *s, void **c) { *c = &g_ctx[str(s)->dev]; return OK; }
API int cuMemGetInfo_v2(size_t *f, size_t *t) { return cudaMemGetInfo(f, t); }
API int cuMemAlloc_v2(void **p, size_t n) { return dev_alloc(p, n, MEM_DEVICE); }
API int cuMemFree_v2(void *p) { return dev_free(p); }
API int cuMemsetD32Async(char *p, unsigned v, size_t n, void *s) { return fill(p, (int)(v & 255), n * 4); }
API int cuStreamWriteValue32(void *s, unsigned *p, unsigned v, unsigned f) { *p = v; return OK; }
API int cuPointerGetAttribute(void *out, int a, const void *p) {
  region r;
  if (!find_region(p, &r)) return E_INVALID;
  switch (a) {
    case 1: *(void **)out = &g_ctx[r.dev]; break;  case 2: *(unsigned *)out = r.kind == MEM_HOST ? 1 : 2; break;
    case 3: case 4: *(const void **)out = p; break;  case 7: *(u64 *)out = r.base; break;
    case 9: *(int *)out = r.dev; break;  case 11: *(u64 *)out = r.base; break;  case 12: *(size_t *)out = r.size; break;
    default: *(int *)out = 0;
  }
  return OK;
}
API int cuMemGetAddressRange(void **b, size_t *n, void *p) {
  region r;
  if (!find_region(p, &r)) return E_INVALID;
  if (b) *b = (void *)r.base;
  if (n) *n = r.size;
  return OK;
}
API int cuMemGetAddressRange_v2(void **b, size_t *n, void *p) { return cuMemGetAddressRange(b, n, p); }
/* virtual memory management: what expandable_segments:True uses */
typedef struct { size_t size; int dev, refs; } vmm_t;
typedef struct { int type, handleTypes; struct { int type, id; } loc; } allocprop_t;
static void vmm_unref(vmm_t *h) { if (!__atomic_sub_fetch(&h->refs, 1, __ATOMIC_ACQ_REL)) { charge(h->dev, -(int64_t)h->size); free(h); } }
typedef struct vmap { uintptr_t at; vmm_t *h; struct vmap *next; } vmap_t;
static vmap_t *g_vmap;
API int cuMemGetAllocationGranularity(size_t *g, const void *p, int o) { *g = PAGE2M; return OK; }
API int cuMemAddressReserve(void **p, size_t n, size_t al, void *at, u64 f) {
  *p = map_pages(n, PROT_NONE);
  if (!*p) return E_OOM;
  add_region(*p, n, t_dev, MEM_RESERVED);
  return OK;
}
API int cuMemAddressFree(void *p, size_t n) { region r; if (!del_region(p, &r)) return E_INVALID; munmap(p, r.size); return OK; }
API int cuMemCreate(vmm_t **h, size_t n, const allocprop_t *p, u64 f) {
  if (p->loc.id < 0 || p->loc.id >= init()) return E_BADDEV;
  if (charge(p->loc.id, n)) return E_OOM;
  *h = calloc(1, sizeof **h);
  (*h)->size = n; (*h)->dev = p->loc.id; (*h)->refs = 1;
  return OK;
}
API int cuMemMap(char *p, size_t n, size_t off, vmm_t *h, u64 f) {
  vmap_t *m = malloc(sizeof *m);
  __atomic_add_fetch(&h->refs, 1, __ATOMIC_ACQ_REL);
  pthread_mutex_lock(&g_mu); *m = (vmap_t){(uintptr_t)p, h, g_vmap}; g_vmap = m; pthread_mutex_unlock(&g_mu);
  return mprotect(p, n, PROT_READ | PROT_WRITE) ? E_INVALID : OK;
}
API int cuMemSetAccess(void *p, size_t n, const void *d, size_t c) { return OK; }
API int cuMemUnmap(char *p, size_t n) {
  madvise(p, n, MADV_DONTNEED);
  mprotect(p, n, PROT_NONE);
  pthread_mutex_lock(&g_mu);
  vmap_t **q = &g_vmap, *dead = 0;
  while (*q) {
    vmap_t *m = *q;
    if (m->at >= (uintptr_t)p && m->at < (uintptr_t)p + n) { *q = m->next; m->next = dead; dead = m; } else q = &m->next;
  }
  pthread_mutex_unlock(&g_mu);
  while (dead) { vmap_t *m = dead; dead = m->next; vmm_unref(m->h); free(m); }
  return OK;
}
API int cuMemRelease(vmm_t *h) { vmm_unref(h); return OK; }
/* modules (Triton, NVRTC): load anything, launch nothing */
API int cuModuleLoadData(void **m, const void *i) { *m = calloc(1, 16); return OK; }
API int cuModuleLoadDataEx(void **m, const void *i, unsigned n, void *o, void *v) { return cuModuleLoadData(m, i); }
API int cuModuleLoad(void **m, const char *f) { return cuModuleLoadData(m, f); }
API int cuModuleUnload(void *m) { return OK; }
API int cuModuleGetFunction(void **f, void *m, const char *n) { *f = m; return OK; }
API int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : 0; return OK; }
API int cuFuncSetAttribute(void *f, int a, int v) { return OK; }
API int cuFuncSetCacheConfig(void *f, int c) { return OK; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int bs, size_t sm) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, bs, sm); }
API int cuLaunchKernel(void) { return launched(); }
API int cuLaunchKernelEx(void) { return launched(); }
API int cuLaunchCooperativeKernel(void) { return launched(); }
API int cuTensorMapEncodeTiled(void) { return OK; }
API int cuTensorMapEncodeIm2col(void) { return OK; }
API int cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) { *n = 8; return OK; }
API int cuCtxSetLimit(int l, size_t v) { return OK; }
API int cuCtxGetLimit(size_t *v, int l) { *v = 1 << 20; return OK; }
API int cuStreamIsCapturing(void *s, int *st) { *st = str(s)->capturing; return OK; }
API int cuPointerGetAttributes(unsigned n, const int *a, void **out, const void *p) {
  int e = OK;
  for (unsigned i = 0; i < n; i++) if (cuPointerGetAttribute(out[i], a[i], p)) e = E_INVALID;
  return e;
}

static int drv_unsupported(void) { trace("unsupported driver call"); return E_NOTSUP; }
API int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, u64 fl, int *st) {
  static void *self;
  if (!self) { Dl_info i; if (dladdr((void *)cuInit, &i)) self = dlopen(i.dli_fname, RTLD_LAZY | RTLD_NOLOAD); }
  char buf[128];
  *f = self ? dlsym(self, name) : 0;
  if (!*f && self) { snprintf(buf, sizeof buf, "%s_v2", name); *f = dlsym(self, buf); }
  if (!*f) { trace("driver entry point %s: unsupported stub", name); *f = (void *)drv_unsupported; }
  if (st) *st = 0;
  return OK;
}
API int cudaGetDriverEntryPoint(const char *n, void **f, u64 fl, int *st) { return cudaGetDriverEntryPointByVersion(n, f, VGPU_CUDA_VERSION, fl, st); }

/* ---------------------------------------------------------------- cuBLAS, cuBLASLt: handles are real, math is not */
static int new_handle(void **h) { *h = calloc(1, 64); return OK; }
API int cublasCreate_v2(void **h) { int e = ensure_ctx(); return e ? 1 : new_handle(h); }
API int cublasDestroy_v2(void *h) { free(h); return OK; }
API int cublasGetMathMode(void *h, int *m) { *m = ((int *)h)[0]; return OK; }
API int cublasSetMathMode(void *h, int m) { ((int *)h)[0] = m; return OK; }
API int cublasGetPointerMode_v2(void *h, int *m) { *m = ((int *)h)[1]; return OK; }
API int cublasSetPointerMode_v2(void *h, int m) { ((int *)h)[1] = m; return OK; }
API int cublasGetVersion_v2(void *h, int *v) { *v = 130401; return OK; }
API size_t cublasLtGetVersion(void) { return 130401; }
API int cublasLtCreate(void **h) { return new_handle(h); }
API int cublasLtMatmulDescCreate(void **h, int c, int s) { return new_handle(h); }
API int cublasLtMatmulDescDestroy(void *h) { free(h); return OK; }
API int cublasLtMatmulPreferenceCreate(void **h) { return new_handle(h); }
API int cublasLtMatmulPreferenceDestroy(void *h) { free(h); return OK; }
API int cublasLtMatrixLayoutCreate(void **h, int t, u64 r, u64 c, int64_t ld) { return new_handle(h); }
API int cublasLtMatrixLayoutDestroy(void *h) { free(h); return OK; }
API int cublasLtMatmulAlgoGetHeuristic(void *lt, void *d, void *A, void *B, void *C, void *D, void *pref, int want, ltres_t *res, int *got) {
  memset(res, 0, sizeof *res);
  res->waves = 1;
  *got = want > 0;
  return OK;
}
API int cublasLtMatmulAlgoCheck(void *lt, void *d, void *A, void *B, void *C, void *D, const void *algo, ltres_t *res) {
  memset(res, 0, sizeof *res);
  res->waves = 1;
  return OK;
}
API int cublasLtMatmulAlgoConfigGetAttribute(const void *al, int a, void *buf, size_t n, size_t *w) { memset(buf, 0, n); if (w) *w = n; return OK; }

/* ---------------------------------------------------------------- what the generated stubs call */
int vgpu_launched(void) { return launched(); }
int vgpu_unsupported(const char *name, int status) {
  fprintf(stderr, "[virtual GPU] %s is not supported\n", name);
  t_err = status;
  return status;
}
