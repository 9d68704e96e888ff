/* The ranks of an NCCL communicator, where they are processes of one session. */
#ifndef VGPU_MEETINGS_H
#define VGPU_MEETINGS_H

#include "gpu.h"

/* A rank comes: its entry of the shared table; NULL where the other ranks cannot be here. */
meeting *vgpu_meet(uint64_t key, int ranks, int rank, int number);
void vgpu_leave(meeting *at, uint64_t serial, int rank);

/* Says to the ranks of the mask what this one has to say: `size` bytes, if they are known. Never waits. */
typedef struct {
  meeting *at;
  uint64_t serial;
  uint32_t number; /* which collective, or which message between two ranks */
  int is_pair;
} occasion;
void vgpu_say(const occasion *o, int rank, unsigned to, const void *bytes, size_t size);

int vgpu_said(const occasion *o, int rank, unsigned from); /* whether all of the mask have, or nobody waits any more */
size_t vgpu_hear(const occasion *o, int rank, int from, void *bytes, size_t size); /* how many bytes it said */

/* After so many nanoseconds of waiting: notes who is missing, if somebody has ended or the time is over. */
void vgpu_look_for_missing(const occasion *o, int rank, unsigned from, long long waited);

#endif
