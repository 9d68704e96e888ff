/* table.h - state shared by all processes that use the virtual GPUs of one "session".
 *
 * One small file in /dev/shm holds the device table and one slot per process.  The CUDA shim
 * (cuda.c) writes it, the NVML shim (nvml.c) reads it, so that what NVML reports for a
 * device is what virtual-GPU processes really obtained from cudaMalloc plus a context overhead.
 */
#ifndef VGPU_SHM_H
#define VGPU_SHM_H
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VG_MAXDEV 16
#define VG_MAXPROC 256
#define VG_MAGIC 0x56475033u
#define MIB (1024ull * 1024ull)

typedef struct {
  char name[64];
  uint64_t total;      /* capacity seen by CUDA and NVML, bytes */
  int major, minor, sms, l2_mib, smem_sm_kib, smem_optin_kib;
} vg_dev;

typedef struct {
  int pid;
  uint64_t start;                 /* start time from /proc/<pid>/stat: guards against pid reuse */
  uint64_t used[VG_MAXDEV];       /* bytes held through cudaMalloc & co., rounded to 2 MiB pages */
  uint64_t peak[VG_MAXDEV];
  uint64_t ctx[VG_MAXDEV];        /* context overhead, charged at the first use of the device */
  int ctx_on[VG_MAXDEV];          /* the process has a context on the device */
  uint64_t launches[VG_MAXDEV];   /* kernel launches, feeds the synthetic utilization */
} vg_proc;

typedef struct {
  uint32_t magic, size;
  pthread_mutex_t mu;
  int ndev;
  uint64_t ctx_bytes;
  vg_dev dev[VG_MAXDEV];
  vg_proc proc[VG_MAXPROC];
} vg_shm;

/* Capacities are those PyTorch typically prints for these cards (approximate); override with VGPU_MEM_MIB. */
static const struct { const char *key; vg_dev d; uint64_t mib; } vg_profiles[] = {
  {"a100-80", {"Virtual A100-80GB", 0, 8, 0, 108, 40, 164, 163}, 81050},
  {"a100-40", {"Virtual A100-40GB", 0, 8, 0, 108, 40, 164, 163}, 40339},
  {"h100-80", {"Virtual H100-80GB", 0, 9, 0, 132, 50, 228, 227}, 81008},
  {"h200",    {"Virtual H200",      0, 9, 0, 132, 60, 228, 227}, 143155},
  {"l4",      {"Virtual L4",        0, 8, 9,  58, 48, 100,  99}, 22564},
  {"rtx4090", {"Virtual RTX 4090",  0, 8, 9, 128, 72, 100,  99}, 24207},
  {"t4",      {"Virtual T4",        0, 7, 5,  40,  4,  64,  64}, 14912},
  {"v100-16", {"Virtual V100-16GB", 0, 7, 0,  80,  6,  96,  96}, 16151},
  {"v100-32", {"Virtual V100-32GB", 0, 7, 0,  80,  6,  96,  96}, 32493},
};

static inline const char *vg_env(const char *k, const char *dflt) {
  const char *v = getenv(k);
  return v && *v ? v : dflt;
}
/* item i of a comma separated list; the last item repeats */
static inline void vg_item(const char *list, int i, char *out, size_t n) {
  const char *p = list, *q;
  while (i-- > 0 && (q = strchr(p, ','))) p = q + 1;
  size_t l = strcspn(p, ",");
  if (l >= n) l = n - 1;
  memcpy(out, p, l); out[l] = 0;
}
static inline uint64_t vg_starttime(int pid) {
  char path[64], buf[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, buf, sizeof buf - 1);
  close(fd);
  if (n <= 0) return 0;
  buf[n] = 0;
  char *p = strrchr(buf, ')');
  if (!p) return 0;
  p += 2;                                   /* field 3; start time is field 22 */
  if (*p == 'Z' || *p == 'X') return 0;     /* dead, waiting to be reaped: its memory is gone */
  for (int i = 3; i < 22 && p; i++) { p = strchr(p, ' '); if (p) p++; }
  return p ? strtoull(p, 0, 10) : 0;
}
static inline void vg_lock(vg_shm *s) {
  if (pthread_mutex_lock(&s->mu) == EOWNERDEAD) pthread_mutex_consistent(&s->mu);
}
static inline void vg_unlock(vg_shm *s) { pthread_mutex_unlock(&s->mu); }

/* drop the slots of processes that are gone; call with the lock held; returns the number alive */
static inline int vg_reap(vg_shm *s) {
  int alive = 0;
  for (int i = 0; i < VG_MAXPROC; i++) {
    vg_proc *p = &s->proc[i];
    if (!p->pid) continue;
    if (vg_starttime(p->pid) != p->start) memset(p, 0, sizeof *p); else alive++;
  }
  return alive;
}
static inline uint64_t vg_dev_used(vg_shm *s, int d) {
  uint64_t u = 0;
  for (int i = 0; i < VG_MAXPROC; i++) if (s->proc[i].pid) u += s->proc[i].used[d] + s->proc[i].ctx[d];
  return u;
}
static inline void vg_configure(vg_shm *s) {
  char it[64];
  s->ndev = atoi(vg_env("VGPU_DEVICES", "1"));
  if (s->ndev < 0) s->ndev = 0;
  if (s->ndev > VG_MAXDEV) s->ndev = VG_MAXDEV;
  s->ctx_bytes = strtoull(vg_env("VGPU_CTX_MIB", "450"), 0, 10) * MIB;
  for (int i = 0; i < s->ndev; i++) {
    vg_item(vg_env("VGPU_PROFILE", "a100-80"), i, it, sizeof it);
    size_t k = 0;
    for (size_t j = 0; j < sizeof vg_profiles / sizeof *vg_profiles; j++)
      if (!strcasecmp(it, vg_profiles[j].key)) k = j;
    s->dev[i] = vg_profiles[k].d;
    s->dev[i].total = vg_profiles[k].mib * MIB;
    const char *m = getenv("VGPU_MEM_MIB");
    if (m && *m) { vg_item(m, i, it, sizeof it); s->dev[i].total = strtoull(it, 0, 10) * MIB; }
  }
}
/* owner = the CUDA shim: may re-read the configuration from the environment when nobody else is alive */
static inline vg_shm *vg_open(int owner) {
  char path[256];
  snprintf(path, sizeof path, "/dev/shm/vgpu.%u.%s", (unsigned)getuid(), vg_env("VGPU_SESSION", "default"));
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return 0;
  flock(fd, LOCK_EX);
  struct stat st;
  int fresh = fstat(fd, &st) || st.st_size != (off_t)sizeof(vg_shm);
  if (fresh && (ftruncate(fd, 0) || ftruncate(fd, sizeof(vg_shm)))) { close(fd); return 0; }
  vg_shm *s = mmap(0, sizeof(vg_shm), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (s == MAP_FAILED) { close(fd); return 0; }
  if (fresh || s->magic != VG_MAGIC || s->size != sizeof(vg_shm)) {
    memset(s, 0, sizeof *s);
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&s->mu, &a);
    vg_configure(s);
    s->size = sizeof *s; s->magic = VG_MAGIC;
  } else if (owner) {
    vg_lock(s);
    if (!vg_reap(s)) vg_configure(s);
    vg_unlock(s);
  }
  flock(fd, LOCK_UN);
  close(fd);
  return s;
}
#endif
