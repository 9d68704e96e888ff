/* nccl_groups.c: how many ranks a communicator has that is split off another. */
#ifndef VGPU_NCCL_GROUPS_H
#define VGPU_NCCL_GROUPS_H

/* Ranks of the group that PyTorch splits off on this thread; 0 if it did not say. */
int vgpu_nccl_told(void);

/* Ranks of the group that gives this colour in a world of `world` and has `rank` at place `key`; 0 if none does. */
int vgpu_nccl_group(int world, int rank, int key, int colour);

#endif
