/* nvml.c - libnvidia-ml.so.1 for virtual GPUs.  Memory and process lists come from the shared table that
 * cuda.c maintains; utilization is synthetic (kernel launch rate), temperature and power follow from it.
 * Every other function that nvidia-ml-py knows answers NVML_ERROR_NOT_SUPPORTED (generated list).
 */
#include "table.h"
#define API __attribute__((visibility("default")))
enum { OK = 0, UNINIT = 1, INVALID = 2, NOTSUP = 3, NOTFOUND = 6, TOOSMALL = 7 };
#define FULL_LOAD_LAUNCHES_PER_S 5000.0

static vg_shm *S;
static int n_init;
typedef struct { double t; uint64_t launches; unsigned util; } rate_t;
static rate_t g_rate[VG_MAXDEV], g_prate[VG_MAXPROC][VG_MAXDEV];
static char g_handles[VG_MAXDEV];
static int dev_of(const void *h) { long i = (const char *)h - g_handles; return i >= 0 && i < (S ? S->ndev : 0) ? (int)i : -1; }
#define DEV(h) if (!S) return UNINIT; int d = dev_of(h); if (d < 0) return INVALID

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static unsigned rate(rate_t *r, uint64_t n) {
  double t = now(), dt = t - r->t;
  if (r->t == 0 || n < r->launches) { r->t = t; r->launches = n; r->util = 0; return 0; }
  if (dt < 0.1) return r->util;
  double u = (n - r->launches) / dt / FULL_LOAD_LAUNCHES_PER_S * 100;
  r->t = t; r->launches = n; r->util = u > 100 ? 100 : (unsigned)(u + 0.5);
  return r->util;
}
static unsigned util(int d) {
  uint64_t n = 0;
  for (int i = 0; i < VG_MAXPROC; i++) if (S->proc[i].pid) n += S->proc[i].launches[d];
  return rate(&g_rate[d], n);
}
static uint64_t used(int d) { vg_lock(S); vg_reap(S); uint64_t u = vg_dev_used(S, d); vg_unlock(S); return u; }
static int text(char *out, unsigned n, const char *s) { if (strlen(s) >= n) return TOOSMALL; strcpy(out, s); return OK; }

API int nvmlInit_v2(void) { if (!S) S = vg_open(0); n_init++; return S ? OK : 9; }
API int nvmlInit(void) { return nvmlInit_v2(); }
API int nvmlInitWithFlags(unsigned f) { return nvmlInit_v2(); }
API int nvmlShutdown(void) { if (!n_init) return UNINIT; n_init--; return OK; }
API const char *nvmlErrorString(int e) {
  switch (e) {
    case OK: return "Success"; case UNINIT: return "Uninitialized"; case INVALID: return "Invalid Argument";
    case NOTSUP: return "Not Supported"; case NOTFOUND: return "Not Found"; case TOOSMALL: return "Insufficient Size";
    default: return "Unknown Error";
  }
}
API int nvmlSystemGetDriverVersion(char *s, unsigned n) { return text(s, n, "600.00.vgpu"); }
API int nvmlSystemGetNVMLVersion(char *s, unsigned n) { return text(s, n, "13.600.00"); }
API int nvmlSystemGetCudaDriverVersion(int *v) { *v = 13020; return OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13020; return OK; }
API int nvmlSystemGetProcessName(unsigned pid, char *s, unsigned n) {
  char path[64], buf[4096];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  int fd = open(path, O_RDONLY);
  if (fd < 0) return NOTFOUND;
  ssize_t k = read(fd, buf, sizeof buf - 1);
  close(fd);
  buf[k > 0 ? k : 0] = 0;
  snprintf(s, n, "%s", buf);
  return OK;
}
API int nvmlDeviceGetCount_v2(unsigned *n) { if (!S) return UNINIT; *n = S->ndev; return OK; }
API int nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (!S) return UNINIT; if (i >= (unsigned)S->ndev) return INVALID; *h = &g_handles[i]; return OK; }
API int nvmlDeviceGetHandleByIndex(unsigned i, void **h) { return nvmlDeviceGetHandleByIndex_v2(i, h); }
API int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
  DEV(h); char u[48];
  snprintf(u, sizeof u, "GPU-564700%02x-0000-0000-0000-000000000001", d);
  return text(s, n, u);
}
API int nvmlDeviceGetHandleByUUID(const char *u, void **h) {
  unsigned i;
  if (sscanf(u, "GPU-564700%2x", &i) != 1) return NOTFOUND;
  return nvmlDeviceGetHandleByIndex_v2(i, h);
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *b, void **h) {
  unsigned dom, bus;
  if (sscanf(b, "%x:%x:", &dom, &bus) != 2 || !bus) return NOTFOUND;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, h) ? NOTFOUND : OK;
}
API int nvmlDeviceGetHandleByPciBusId(const char *b, void **h) { return nvmlDeviceGetHandleByPciBusId_v2(b, h); }
API int nvmlDeviceGetIndex(void *h, unsigned *i) { DEV(h); *i = d; return OK; }
API int nvmlDeviceGetMinorNumber(void *h, unsigned *i) { DEV(h); *i = d; return OK; }
API int nvmlDeviceGetName(void *h, char *s, unsigned n) { DEV(h); return text(s, n, S->dev[d].name); }
typedef struct { char legacy[16]; unsigned domain, bus, device, devId, subId; char busId[32]; } pci_t;
API int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) {
  DEV(h);
  memset(p, 0, sizeof *p);
  snprintf(p->legacy, 16, "0000:%02X:00.0", (d + 1) & 255); snprintf(p->busId, 32, "00000000:%02X:00.0", (d + 1) & 255);
  p->bus = d + 1;
  return OK;
}
API int nvmlDeviceGetPciInfo_v2(void *h, pci_t *p) { return nvmlDeviceGetPciInfo_v3(h, p); }
API int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) {       /* total, free, used */
  DEV(h);
  uint64_t u = used(d), t = S->dev[d].total;
  m[0] = t; m[1] = t > u ? t - u : 0; m[2] = u;
  return OK;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } mem2_t;
API int nvmlDeviceGetMemoryInfo_v2(void *h, mem2_t *m) {
  DEV(h);
  uint64_t u = used(d), t = S->dev[d].total;
  m->total = t; m->reserved = 0; m->free = t > u ? t - u : 0; m->used = u;
  return OK;
}
API int nvmlDeviceGetBAR1MemoryInfo(void *h, unsigned long long *m) { DEV(h); m[0] = 128ull << 30; m[2] = 2 * MIB; m[1] = m[0] - m[2]; return OK; }
API int nvmlDeviceGetUtilizationRates(void *h, unsigned *u) { DEV(h); u[0] = util(d); u[1] = u[0] / 2; return OK; }
API int nvmlDeviceGetEncoderUtilization(void *h, unsigned *u, unsigned *p) { DEV(h); *u = 0; *p = 167000; return OK; }
API int nvmlDeviceGetDecoderUtilization(void *h, unsigned *u, unsigned *p) { DEV(h); *u = 0; *p = 167000; return OK; }
API int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *t) { DEV(h); *t = 34 + util(d) * 2 / 5; return OK; }
API int nvmlDeviceGetTemperatureV(void *h, unsigned *t) { DEV(h); t[2] = 34 + util(d) * 2 / 5; return OK; }
API int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { DEV(h); *mw = 62000 + util(d) * 3300; return OK; }
API int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { DEV(h); *mw = 400000; return OK; }
API int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) { DEV(h); *mw = 400000; return OK; }
API int nvmlDeviceGetClockInfo(void *h, int type, unsigned *mhz) { DEV(h); *mhz = type == 2 ? 1215 : util(d) ? 1410 : 210; return OK; }
API int nvmlDeviceGetMaxClockInfo(void *h, int type, unsigned *mhz) { DEV(h); *mhz = type == 2 ? 1215 : 1410; return OK; }
API int nvmlDeviceGetPerformanceState(void *h, int *p) { DEV(h); *p = util(d) ? 0 : 8; return OK; }
API int nvmlDeviceGetPersistenceMode(void *h, int *m) { DEV(h); *m = 1; return OK; }
API int nvmlDeviceGetDisplayActive(void *h, int *m) { DEV(h); *m = 0; return OK; }
API int nvmlDeviceGetDisplayMode(void *h, int *m) { DEV(h); *m = 0; return OK; }
API int nvmlDeviceGetComputeMode(void *h, int *m) { DEV(h); *m = 0; return OK; }
API int nvmlDeviceGetCudaComputeCapability(void *h, int *ma, int *mi) { DEV(h); *ma = S->dev[d].major; *mi = S->dev[d].minor; return OK; }
API int nvmlDeviceGetMigMode(void *h, unsigned *c, unsigned *p) { return NOTSUP; }
API int nvmlDeviceGetFanSpeed(void *h, unsigned *s) { return NOTSUP; }
API int nvmlDeviceGetTotalEccErrors(void *h, int a, int b, unsigned long long *n) { DEV(h); *n = 0; return OK; }
API int nvmlDeviceGetP2PStatus(void *a, void *b, int i, int *st) { *st = 0; return OK; }
API int nvmlDeviceGetNvLinkState(void *h, unsigned l, int *st) { return NOTSUP; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned l, int *t) { return NOTSUP; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned l, void *p) { return NOTSUP; }
API int nvmlDeviceGetGpuFabricInfoV(void *h, void *p) { return NOTSUP; }

typedef struct { unsigned pid; unsigned long long mem; } proc1_t;
typedef struct { unsigned pid; unsigned long long mem; unsigned gi, ci; } proc2_t;
static int list(void *h, unsigned *n, void *out, int v) {
  DEV(h);
  unsigned k = 0, cap = *n;
  vg_lock(S);
  vg_reap(S);
  for (int i = 0; i < VG_MAXPROC; i++) {
    vg_proc *p = &S->proc[i];
    if (!p->pid || !(p->ctx_on[d] || p->used[d])) continue;
    if (out && k < cap) {
      if (v == 1) ((proc1_t *)out)[k] = (proc1_t){p->pid, p->used[d] + p->ctx[d]};
      else ((proc2_t *)out)[k] = (proc2_t){p->pid, p->used[d] + p->ctx[d], 0xffffffffu, 0xffffffffu};
    }
    k++;
  }
  vg_unlock(S);
  *n = k;
  return k > cap || (k && !out) ? TOOSMALL : OK;
}
API int nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *n, void *o) { return list(h, n, o, 1); }
API int nvmlDeviceGetComputeRunningProcesses_v2(void *h, unsigned *n, void *o) { return list(h, n, o, 2); }
API int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, void *o) { return list(h, n, o, 2); }
static int none(void *h, unsigned *n) { DEV(h); *n = 0; return OK; }
API int nvmlDeviceGetGraphicsRunningProcesses(void *h, unsigned *n, void *o) { return none(h, n); }
API int nvmlDeviceGetGraphicsRunningProcesses_v2(void *h, unsigned *n, void *o) { return none(h, n); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, void *o) { return none(h, n); }
API int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *n, void *o) { return none(h, n); }
typedef struct { unsigned pid; unsigned long long ts; unsigned sm, mem, enc, dec; } putil_t;
API int nvmlDeviceGetProcessUtilization(void *h, putil_t *o, unsigned *n, unsigned long long since) {
  DEV(h);
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  unsigned k = 0, cap = *n;
  for (int i = 0; i < VG_MAXPROC; i++) {
    vg_proc *p = &S->proc[i];
    if (!p->pid || !p->ctx_on[d]) continue;
    if (o && k < cap) { unsigned u = rate(&g_prate[i][d], p->launches[d]); o[k] = (putil_t){p->pid, t.tv_sec * 1000000ull + t.tv_nsec / 1000, u, u / 2, 0, 0}; }
    k++;
  }
  *n = k;
  return k > cap || (k && !o) ? TOOSMALL : OK;
}

