/* y = x W' + bias for bfloat16 weights [O, I] and many rows, where the CPU has no instruction for their products: 16 COLUMNS
   outputs after another are transposed and widened, so that lanes are outputs.

   The bits are those of bfloat16.h: of each BLOCK inputs, chain l adds up the numbers that lane l takes there, chains 2 m and
   2 m + 1 are added, and these eight sums are added to the output in turn. */
#include "bfloat16.h"
#include "transposed.h"

#define HALF 8 /* chains, whose weights stay in the first cache while all rows pass */

typedef struct {
  int64_t o, begin, taken, first; /* outputs from o on; steps from `begin` on of each chain, so many; rows from `first` on */
  int chain;                      /* the first of HALF */
  const float *w;
  float *sums; /* [GROUP, 16 COLUMNS] */
} Transposed;
IN int64_t steps_of(const Job *job) { return job->width / 16; }
IN int64_t taken_from(const Job *job, int64_t begin) { return steps_of(job) - begin < BLOCK / 16 ? steps_of(job) - begin : BLOCK / 16; }
/* A block of W is [16 chains, steps, 16 COLUMNS], and chains are so far apart that they are not all in the same sets of a cache. */
IN int64_t apart(int64_t taken) { return (taken * COLUMNS + 1) * 16; }
IN int64_t place_of(int64_t begin) { return begin / (BLOCK / 16) * 16 * apart(BLOCK / 16); }

IN void transpose_outputs(const Job *job, int64_t o, float *to) {
  const int64_t in = job->w->in, rest = job->w->out - o;
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  for (int c = 0; c < COLUMNS; c++, w += 16 * in)
    for (int64_t k = 0; k < in; k += 32) {
      const int64_t begin = k / BLOCK * (BLOCK / 16), chain = apart(taken_from(job, begin)), n = in - k < 32 ? in - k : 32;
      float *at = to + place_of(begin) + ((k / 16 - begin) * COLUMNS + c) * 16;
      B raw[16];
      F v[16], y[16];
      if (n == 32 && 16 * c + 16 <= rest) {
        UNROLL for (int i = 0; i < 16; i++) raw[i] = ldc(w + i * in + k);
      } else {
        for (int i = 0; i < 16; i++) raw[i] = 16 * c + i < rest ? ldcn(w + i * in + k, (int)(2 * n)) : ldcn(w, 0);
      }
      UNROLL for (int i = 0; i < 16; i++) v[i] = second(raw[i]);
      transpose16(v, y);
      UNROLL for (int l = 0; l < 16; l++) st(at + l * chain, y[l]);
      UNROLL for (int i = 0; i < 16; i++) v[i] = first(raw[i]);
      transpose16(v, y);
      UNROLL for (int l = 0; l < 16; l++) st(at + l * chain + 16 * COLUMNS, y[l]);
    }
}
/* Rows of x, widened as bfloat16.c does it, packed in tile order: of HALF chains of a block, number after number of a tile's rows */
IN void pack(const Job *job, int64_t row, const int r) {
  const float *x = job->x + row * job->width;
  for (int64_t begin = 0, taken; begin < steps_of(job); begin += taken) {
    taken = taken_from(job, begin);
    for (int64_t step = 0; step < taken; step++) {
      float *to = (float *)job->packed + begin * 16 * job->rows + (row * HALF * taken) + step * r;
      F v[16], y[16];
      UNROLL for (int i = 0; i < 16; i++) v[i] = i < r ? ld(x + i * job->width + 16 * (begin + step)) : all(0);
      transpose16(v, y);
      UNROLL for (int l = 0; l < 16; l++) stn(to + l / HALF * HALF * taken * job->rows + l % HALF * taken * r, y[l], r);
    }
  }
}
static void pack_tile(void *p, int number) {
  const Job *job = p;
  const int64_t row = (int64_t)number * TALL;
#define PACK(r) pack(job, row, r)
  FOR_EACH_HEIGHT(job->rows - row, PACK)
}
void pack_transposed_bf16(Job *job, int threads) {
  job->packed = scratch(1, sizeof(float) * (size_t)(job->rows * job->width));
  pieces(pack_tile, job, (int)((job->rows + TALL - 1) / TALL), threads);
}

IN void tile(const Job *job, const Transposed *a, int64_t row, const int r) {
  const int64_t wide = job->w->out - a->o;
  const int is_last = a->begin + a->taken == steps_of(job) && a->chain == HALF;
  const float *w = a->w, *x = job->packed + (a->begin * 16 + a->chain * a->taken) * job->rows + row * HALF * a->taken;
  float *sums = a->sums + (row - a->first) * 16 * COLUMNS;
  float even[TALL * COLUMNS * 16] __attribute__((aligned(64)));
  for (int chain = 0; chain < HALF; chain++, w += apart(a->taken)) {
    F s[TALL][COLUMNS], v[COLUMNS];
    UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < COLUMNS; j++) s[i][j] = all(0);
    for (int64_t k = 0; k < a->taken; k++, x += r) {
      UNROLL for (int j = 0; j < COLUMNS; j++) v[j] = ld(w + (k * COLUMNS + j) * 16);
      __builtin_prefetch(x + X_AHEAD, 0, 3);
      UNROLL for (int i = 0; i < r; i++) {
        const F u = all(x[i]);
        UNROLL for (int j = 0; j < COLUMNS; j++) s[i][j] = fma16(u, v[j], s[i][j]);
      }
    }
    const int is_new = a->begin == 0 && a->chain == 0 && chain == 1;
    UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < COLUMNS; j++) {
      const int at = (i * COLUMNS + j) * 16;
      if (chain % 2 == 0) {
        st(even + at, s[i][j]);
        continue;
      }
      const F sum = add(is_new ? all(0) : ld(sums + at), add(ld(even + at), s[i][j]));
      if (!is_last || chain < HALF - 1) st(sums + at, sum);
      else if (wide > 16 * j) put16(job, row + i, a->o + 16 * j, wide - 16 * j, sum);
    }
  }
}
void outputs_transposed_bf16(const Job *job, int64_t from, int64_t to) {
  const int64_t transposed = place_of(steps_of(job) + BLOCK / 16 - 1);
  float *w = scratch(4, sizeof(float) * (size_t)(transposed + GROUP * 16 * COLUMNS));
  Transposed a = {.sums = w + transposed};
  for (a.o = from; a.o < to; a.o += 16 * COLUMNS) {
    transpose_outputs(job, a.o, w);
    for (a.first = 0; a.first < job->rows; a.first += GROUP)
      for (a.begin = 0; a.begin < steps_of(job); a.begin += a.taken) {
        a.taken = taken_from(job, a.begin);
        for (a.chain = 0; a.chain < 16; a.chain += HALF) {
          a.w = w + place_of(a.begin) + a.chain * apart(a.taken);
          for (int64_t row = a.first; row < job->rows && row < a.first + GROUP; row += TALL) {
#define TILE(r) tile(job, &a, row, r)
            FOR_EACH_HEIGHT(job->rows - row, TILE)
          }
        }
      }
  }
}
