/* The table in /dev/shm that all processes of one session share: its devices, and what each process holds of them.
 *
 * The CUDA side writes it and the NVML side reads it, so that what NVML says of a device is what processes really
 * obtained from cudaMalloc, plus their contexts. Nobody removes a process from it when it ends: a process is there
 * while the kernel says it lives, which is also true after kill -9 and leaves no work for exit handlers.
 */
#ifndef VGPU_TABLE_H
#define VGPU_TABLE_H

#include <pthread.h>
#include <stdint.h>

#define MAX_DEVICES 16
#define MAX_PROCESSES 256
#define MAX_FAULT_TEXT 2048
#define MAX_MEETINGS 64
#define MIB (1024ull * 1024ull)

typedef struct {
  char name[96];
  uint64_t total;   /* capacity, bytes */
  uint64_t context; /* what each process costs this device beside its allocations, bytes */
  int major, minor; /* compute capability */
  int processors;   /* streaming multiprocessors */
  int l2_mib;
  int shared_kib;       /* shared memory of a multiprocessor */
  int shared_block_kib; /* of which one block can have */
  int gpu;              /* the board it is on: its own index, or that of the first MIG instance there */
  int instance;         /* MIG GPU instance number, from 1; 0 for a whole board */
  uint64_t board_total; /* capacity of the whole board, bytes */
} device_info;

/* What a device gave at most, and what it refused, since the session began: outlives the processes. */
typedef struct {
  uint64_t used;          /* the most that all processes together held, contexts included, bytes */
  uint64_t contexts;      /* of which contexts, at that moment */
  uint64_t refusals;      /* allocations it could not give; PyTorch frees its cached blocks and asks again */
  uint64_t refused_bytes; /* the newest of them, whole pages */
} device_record;

typedef struct {
  int pid;
  uint64_t start;                  /* start time from /proc/<pid>/stat: guards against reuse of the pid */
  uint64_t held[MAX_DEVICES];      /* bytes obtained through cudaMalloc and its like, whole 2 MiB pages */
  uint64_t peak[MAX_DEVICES];      /* its maximum */
  uint64_t context[MAX_DEVICES];   /* bytes of the context, charged at the first use of the device */
  int has_context[MAX_DEVICES];
  uint64_t launches[MAX_DEVICES];  /* kernels launched; the synthetic utilization follows their rate */
} process_info;

/* An NCCL communicator whose ranks are processes of this session. Each rank writes what is its own. */
typedef struct {
  uint64_t key;    /* made of the unique id; 0: nobody uses this entry */
  uint64_t serial; /* counts the entries' uses: another number is another communicator */
  int ranks;
  int broken; /* a rank is missing: nobody waits in this communicator any more */
  struct {
    int pid; /* 0: has not come yet */
    int number; /* in the whole job, as far as its process knows */
    uint64_t start;
    int left; /* it destroyed its communicator */
  } rank[MAX_DEVICES];
  uint32_t joined_in[MAX_DEVICES];             /* collectives that this rank has joined in */
  uint32_t sent[MAX_DEVICES][MAX_DEVICES]; /* messages from one to the other */
} meeting;

/* The first rank that others waited for in vain. */
typedef struct {
  int happened, rank, ended; /* ended: its process had; else it did not come within so many seconds */
  int seconds;
} absence_info;

typedef struct {
  uint32_t magic, size;
  pthread_mutex_t mutex;
  char specification[4096]; /* VGPU_DEVICES as it was when this table was configured */
  int devices;
  int cuda_order[MAX_DEVICES]; /* CUDA ordinal -> device, unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML's is the identity */
  char faults[MAX_FAULT_TEXT]; /* "nvmlDeviceGetPowerUsage=na,lost=0,...": what goes wrong from now on */
  device_info device[MAX_DEVICES];
  device_record record[MAX_DEVICES];
  process_info process[MAX_PROCESSES];
  uint64_t meetings; /* how many there were */
  meeting met[MAX_MEETINGS];
  absence_info absence;
} shared_table;

/* Opens the session's table, making it if need be; a CUDA process may reconfigure one that no live process uses.
 * NULL, with a line on stderr, where that is not possible. */
shared_table *table_open(const char *session, int owner);

void table_lock(shared_table *table);
void table_unlock(shared_table *table);

/* With the lock held: forget processes that are gone, find or make this process's entry, add up a device. */
int table_reap(shared_table *table);
process_info *table_enter(shared_table *table);
uint64_t table_start_time(int pid); /* 0: there is no such process */
uint64_t table_used(shared_table *table, int device);

/* The value of "name=value" in a comma-separated list; 0 if it is not there. */
int list_value(const char *list, const char *name, char *value, size_t size);

/* Whether the session's faults say that this device is lost. */
int table_lost(const shared_table *table, int device);

const char *setting(const char *name, const char *otherwise);

#endif
