/* Weights [I, O] as they lie and many rows (in_out.c, bfloat16_in_out.c): TALL rows by WIDE columns, or half of them, in registers,
   for a block of a part's inputs. Sums wait in `sums` [N, WIDE] between the blocks of a part, and in `total` between parts. */
#pragma once
#include "job.h"

#define WIDE (16 * C)
/* Inputs whose weights stay in the first cache while the tiles of all rows pass. Each may lie in another page: few, so that pages
   are not looked up again and again; but more where there is much to compute, and sums are moved less often. */
#define SHALLOW 32
#if defined(__AVX512F__)
#define DEEP_ROWS 97
#else
#define DEEP_ROWS 17
#endif
#ifdef __AVX512BF16__
#define DEPTH_BF16 128
#else
#define DEPTH_BF16 64
#endif
IN int64_t depth_of(const Job *job) { return job->w->type == BF16 ? DEPTH_BF16 : job->rows < DEEP_ROWS ? SHALLOW : 128; }
IN int64_t stop_of(const Job *job, int64_t k, int64_t part_stop) { /* of the block that begins with input k */
  const int64_t stop = k + depth_of(job);
  return stop < part_stop ? stop : part_stop;
}
typedef struct {
  int64_t o, k, stop, part, part_stop; /* columns from o on, inputs [k, stop) of [part, part_stop) */
  int64_t strip, strips, depth;        /* of the piece; of a block */
  float *copy, *sums, *total;          /* copy: of the strip's W for this block */
} InOut;
/* All strips of a piece, block after block of the inputs */
IN void all_blocks(const Job *job, int number, void (*block)(const Job *job, const InOut *a)) {
  const int64_t each = WIDE * job->rows, from = number * job->block, rest = job->w->out - from;
  InOut a = {.depth = stop_of(job, 0, job->length), .strips = ((rest < job->block ? rest : job->block) + WIDE - 1) / WIDE};
  a.copy = scratch(4, sizeof(float) * (size_t)(depth_of(job) * WIDE + 2 * each * a.strips));
  for (a.part = 0; a.part < job->width; a.part = a.part_stop) {
    a.part_stop = a.part + job->length < job->width ? a.part + job->length : job->width;
    for (a.k = a.part; a.k < a.part_stop; a.k = a.stop) {
      a.stop = stop_of(job, a.k, a.part_stop);
      for (a.strip = 0; a.strip < a.strips; a.strip++) {
        a.o = from + a.strip * WIDE;
        a.sums = a.copy + depth_of(job) * WIDE + 2 * each * a.strip;
        a.total = a.sums + each;
        block(job, &a);
      }
    }
  }
}
void pack_in_out(Job *job, int threads); /* x is packed in tile order; the first tile of float32 and float16 has R rows (in_out.c) */
