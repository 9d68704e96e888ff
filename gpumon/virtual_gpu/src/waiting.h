/* What a collective leaves to be done when the other ranks have said their part. */
#ifndef VGPU_WAITING_H
#define VGPU_WAITING_H

#include "meetings.h"

typedef struct {
  occasion when;
  int rank;
  unsigned from;  /* mask of the ranks that are waited for */
  int takes_own;  /* this rank's own part is one of those that go into `to` */
  const void *own;
  size_t own_size;
  void *to;      /* NULL: nothing is to be moved, only waited for */
  size_t part;   /* bytes that each rank's part takes there */
  size_t offset; /* where in what a rank said its part begins */
  int is_spread; /* the parts lie one after another, by rank; else all go to the same place */
  int type, operation;
  int is_reduction;
} receipt;

void vgpu_await(const receipt *r, stream *queue);

/* reductions.c: whether it knows how; the first call for a message has `first` */
int vgpu_reduce(void *sum, const void *other, size_t size, int type, int operation, int first);
int vgpu_finish_reduction(void *sum, size_t size, int type, int operation, int ranks);

#endif
