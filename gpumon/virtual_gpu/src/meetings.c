/* Where the ranks of a communicator meet: an entry in the session's table counts what each has said, and small messages
 * lie in files beside the table, one for each reader, who removes it. So nobody who speaks ever waits.
 *
 * Other ranks are waited for only where they can be: in a communicator with no more ranks than the session has devices.
 * A process that is one rank of a larger job (a test, an estimate) is alone, and nobody is missed.
 */
#define _GNU_SOURCE
#include "meetings.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- coming and leaving */

static int is_gone(const meeting *m, int rank) {
  return m->rank[rank].pid && (m->rank[rank].left || table_start_time(m->rank[rank].pid) != m->rank[rank].start);
}

static int is_over(const meeting *m) {
  for (int i = 0; i < m->ranks; i++) {
    if (m->rank[i].pid && !is_gone(m, i)) return 0;
  }
  return 1;
}

/* The same key comes again where a group is made twice: the oldest entry that this rank is not in yet is the one. */
static meeting *find(uint64_t key, int ranks, int rank) {
  meeting *found = 0;
  for (int i = 0; i < MAX_MEETINGS; i++) {
    meeting *m = &vgpu_table->met[i];
    if (m->key != key || m->ranks != ranks || m->rank[rank].pid) continue;
    if (!found || m->serial < found->serial) found = m;
  }
  return found;
}

static meeting *begin(uint64_t key, int ranks) {
  meeting *unused = 0;
  for (int i = 0; i < MAX_MEETINGS && !unused; i++) {
    if (!vgpu_table->met[i].key) unused = &vgpu_table->met[i];
  }
  for (int i = 0; i < MAX_MEETINGS && !unused; i++) {
    if (is_over(&vgpu_table->met[i])) unused = &vgpu_table->met[i];
  }
  if (!unused) return 0;
  memset(unused, 0, sizeof *unused);
  unused->serial = ++vgpu_table->meetings;
  unused->ranks = ranks;
  unused->key = key;
  return unused;
}

meeting *vgpu_meet(uint64_t key, int ranks, int rank, int number) {
  if (!vgpu_devices() || ranks < 2 || ranks > vgpu_table->devices) return 0;
  table_lock(vgpu_table);
  meeting *m = find(key, ranks, rank);
  if (!m) m = begin(key, ranks);
  if (m) {
    m->rank[rank].start = table_start_time(getpid());
    m->rank[rank].number = number;
    m->rank[rank].pid = getpid();
  }
  table_unlock(vgpu_table);
  if (!m) vgpu_unsupported("more communicators at a time than the session's table has room for", 0);
  return m;
}

void vgpu_leave(meeting *m, uint64_t serial, int rank) {
  if (m->serial == serial) m->rank[rank].left = 1;
}

/* ---- speaking and hearing */

static void name_file(char *path, size_t size, const occasion *o, int from, int to) {
  snprintf(path, size, "/dev/shm/vgpu.%u.%s+%llu.%c.%d.%d.%u", (unsigned)getuid(), setting("VGPU_SESSION", "default"),
           (u64)o->serial, o->is_pair ? 'p' : 'c', from, to, o->number);
}

static int write_file(const char *path, const char *bytes, size_t size) {
  int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return 0;
  while (size) {
    ssize_t written = write(file, bytes, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    bytes += written;
    size -= (size_t)written;
  }
  int reason = errno;
  close(file);
  if (size) unlink(path);
  errno = reason;
  return !size;
}

static uint32_t *counter(const occasion *o, int from, int to) {
  return o->is_pair ? &o->at->sent[from][to] : &o->at->joined_in[from];
}

void vgpu_say(const occasion *o, int rank, unsigned to, const void *bytes, size_t size) {
  if (o->at->serial != o->serial) return;
  char first[256], other[256];
  int written = 0, last = 0;
  for (int i = 0; i < o->at->ranks; i++) {
    if (!(to >> i & 1)) continue;
    last = i;
    if (!size || o->at->broken) continue;
    name_file(other, sizeof other, o, rank, i);
    int done = written ? !link(first, other) : write_file(other, bytes, size);
    if (!done) {
      fprintf(stderr, "[virtual GPU] %s: %s, so this message does not arrive\n", other, strerror(errno));
      break;
    }
    if (!written++) memcpy(first, other, sizeof first);
  }
  __atomic_store_n(counter(o, rank, last), o->number + 1, __ATOMIC_RELEASE);
}

static int has_said(const occasion *o, int rank, int from) {
  return (int32_t)(__atomic_load_n(counter(o, from, rank), __ATOMIC_ACQUIRE) - o->number) > 0;
}

int vgpu_said(const occasion *o, int rank, unsigned from) {
  if (o->at->serial != o->serial || o->at->broken) return 1;
  for (int i = 0; i < o->at->ranks; i++) {
    if ((from >> i & 1) && !has_said(o, rank, i)) return 0;
  }
  return 1;
}

size_t vgpu_hear(const occasion *o, int rank, int from, void *bytes, size_t size) {
  char path[256];
  size_t got = 0;
  name_file(path, sizeof path, o, from, rank);
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) return 0; /* it said nothing that is known */
  while (got < size) {
    ssize_t part = read(file, (char *)bytes + got, size - got);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) break;
    got += (size_t)part;
  }
  close(file);
  unlink(path);
  return got;
}

/* ---- who does not come */

static int patience(void) { return atoi(setting("VGPU_NCCL_WAIT", "60")); }

void vgpu_look_for_missing(const occasion *o, int rank, unsigned from, long long waited) {
  /* once somebody was missed, the verdict is unknown anyway: no reason to wait as long in every communicator */
  int late = waited >= (vgpu_table->absence.happened ? 1 : patience()) * 1000000000ll;
  table_lock(vgpu_table);
  meeting *m = o->at;
  for (int i = 0; i < m->ranks && m->serial == o->serial && !m->broken; i++) {
    if (!(from >> i & 1)) continue;
    int gone = is_gone(m, i);
    if (has_said(o, rank, i) || !(gone || late)) continue; /* looked at in this order: last words count */
    int number = m->rank[i].pid ? m->rank[i].number : i;
    absence_info noted = {1, number, gone, patience()};
    if (!vgpu_table->absence.happened) vgpu_table->absence = noted;
    m->broken = 1;
    if (gone) fprintf(stderr, "[virtual GPU] rank %d has ended, and other ranks waited for it: they go on\n", number);
    else fprintf(stderr, "[virtual GPU] rank %d did not come within %d s: the other ranks go on\n", number, patience());
  }
  table_unlock(vgpu_table);
}
