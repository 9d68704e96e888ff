/* The shared table: opening, configuring from VGPU_DEVICES, and keeping only live processes in it. */
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x56475036u

const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

void table_lock(shared_table *table) {
  /* A process killed while it held the lock leaves consistent sums: every change below is one assignment. */
  if (pthread_mutex_lock(&table->mutex) == EOWNERDEAD) pthread_mutex_consistent(&table->mutex);
}

void table_unlock(shared_table *table) {
  pthread_mutex_unlock(&table->mutex);
}

/* Start time of a process in clock ticks since boot; 0 if it is gone or only waits to be reaped. */
uint64_t table_start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return 0;
  text[length] = 0;
  char *at = strrchr(text, ')'); /* the name before it may hold anything */
  if (!at) return 0;
  at += 2; /* field 3, the state; the start time is field 22 */
  if (*at == 'Z' || *at == 'X') return 0;
  for (int field = 3; field < 22 && at; field++) {
    at = strchr(at, ' ');
    if (at) at++;
  }
  return at ? strtoull(at, 0, 10) : 0;
}

int table_reap(shared_table *table) {
  int alive = 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    process_info *process = &table->process[i];
    if (!process->pid) continue;
    if (table_start_time(process->pid) == process->start) alive++;
    else memset(process, 0, sizeof *process);
  }
  return alive;
}

process_info *table_enter(shared_table *table) {
  table_reap(table);
  for (int i = 0; i < MAX_PROCESSES; i++) {
    process_info *process = &table->process[i];
    if (process->pid) continue;
    memset(process, 0, sizeof *process);
    process->start = table_start_time(getpid());
    process->pid = getpid();
    return process;
  }
  return 0;
}

uint64_t table_used(shared_table *table, int device) {
  uint64_t used = 0;
  for (int i = 0; i < MAX_PROCESSES; i++) {
    const process_info *process = &table->process[i];
    if (process->pid) used += process->held[device] + process->context[device];
  }
  return used;
}

int list_value(const char *list, const char *name, char *value, size_t size) {
  size_t length = strlen(name);
  for (const char *item = list; *item;) {
    size_t end = strcspn(item, ",");
    if (end > length && !strncmp(item, name, length) && item[length] == '=') {
      size_t rest = end - length - 1;
      if (rest >= size) rest = size - 1;
      memcpy(value, item + length + 1, rest);
      value[rest] = 0;
      return 1;
    }
    item += end + (item[end] == ',');
  }
  return 0;
}

int table_lost(const shared_table *table, int device) {
  char name[24], value[8];
  if (!table->faults[0]) return 0;
  snprintf(name, sizeof name, "lost%d", device);
  return list_value(table->faults, name, value, sizeof value) && strcmp(value, "0") != 0;
}

/* One device: name|total|context|major|minor|processors|l2|shared|shared of a block|gpu|instance|board total */
static int parse_device(char *text, device_info *device) {
  char *rest = text, *field[12];
  for (int i = 0; i < 12; i++) {
    field[i] = strsep(&rest, "|");
    if (!field[i]) return 0;
  }
  memset(device, 0, sizeof *device);
  snprintf(device->name, sizeof device->name, "%s", field[0]);
  device->total = strtoull(field[1], 0, 10);
  device->context = strtoull(field[2], 0, 10);
  device->major = atoi(field[3]);
  device->minor = atoi(field[4]);
  device->processors = atoi(field[5]);
  device->l2_mib = atoi(field[6]);
  device->shared_kib = atoi(field[7]);
  device->shared_block_kib = atoi(field[8]);
  device->gpu = atoi(field[9]);
  device->instance = atoi(field[10]);
  device->board_total = strtoull(field[11], 0, 10);
  return 1;
}

static void configure(shared_table *table) {
  const char *specification = setting("VGPU_DEVICES", "");
  if (table->magic == MAGIC && !strcmp(table->specification, specification)) return;
  char text[sizeof table->specification];
  snprintf(text, sizeof text, "%s", specification);
  memcpy(table->specification, text, sizeof text);
  table->devices = 0;
  char *rest = text, *item;
  while ((item = strsep(&rest, ";")) && *item && table->devices < MAX_DEVICES) {
    if (parse_device(item, &table->device[table->devices])) table->devices++;
  }
  char order[128], *next = order;
  snprintf(order, sizeof order, "%s", setting("VGPU_CUDA_ORDER", ""));
  for (int i = 0; i < table->devices; i++) {
    const char *number = next && *next ? strsep(&next, ",") : 0;
    int device = number ? atoi(number) : i;
    table->cuda_order[i] = device >= 0 && device < table->devices ? device : i;
  }
  table->faults[0] = 0;
}

static void initialize(shared_table *table) {
  memset(table, 0, sizeof *table);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&table->mutex, &attributes);
  configure(table);
  table->size = sizeof *table;
  table->magic = MAGIC;
}

/* Under the file's lock, so that two processes starting at the same moment make one table between them. */
static shared_table *open_locked(int file, int owner) {
  struct stat status;
  if (fstat(file, &status)) return 0;
  if (status.st_size == 0 && ftruncate(file, sizeof(shared_table))) return 0;
  if (status.st_size != 0 && status.st_size != (off_t)sizeof(shared_table)) {
    errno = EPROTO; /* made by another build: neither may write into the other's layout */
    return 0;
  }
  shared_table *table = mmap(0, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (table == MAP_FAILED) return 0;
  if (table->magic != MAGIC) {
    initialize(table);
  } else if (owner) {
    table_lock(table);
    if (!table_reap(table)) configure(table);
    table_unlock(table);
  }
  return table;
}

shared_table *table_open(const char *session, int owner) {
  char path[256];
  snprintf(path, sizeof path, "/dev/shm/vgpu.%u.%s", (unsigned)getuid(), session);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  shared_table *table = 0;
  if (file >= 0) {
    flock(file, LOCK_EX);
    table = open_locked(file, owner);
    int reason = errno;
    flock(file, LOCK_UN);
    close(file);
    errno = reason;
  }
  if (!table) {
    const char *reason = errno == EPROTO ? "another version made it; choose another session" : strerror(errno);
    fprintf(stderr, "[virtual GPU] %s: %s\n", path, reason);
  }
  return table;
}
