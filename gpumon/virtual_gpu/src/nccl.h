/* A communicator, as the files of NCCL's side see it. */
#ifndef VGPU_NCCL_H
#define VGPU_NCCL_H

#include "waiting.h"

#define NCCL_UNHANDLED_CUDA_ERROR 1

typedef struct {
  int ranks, rank;
  int world, number; /* ranks of the communicator that was not split off another, and which of them this one is */
  void *buffers;
  meeting *with; /* the other ranks; NULL where they are not here */
  u64 key, serial;
  uint32_t joined_in, sent[MAX_DEVICES], received[MAX_DEVICES];
} communicator;

#endif
