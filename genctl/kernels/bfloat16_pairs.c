/* y = x W' + bias for bfloat16 weights [O, I] and many rows, by dot products of pairs: 16 COLUMNS outputs after another are transposed, so
   that lanes are outputs and no lanes are added up.

   The bits are those of bfloat16.h: of each BLOCK inputs, chain l takes pair l of each 32, chains 2 m and 2 m + 1 are added, and
   these eight sums are added to the output in turn. Two such chains pass together. */
#include "bfloat16.h"
#include "transposed.h"

#ifdef __AVX512BF16__
#define HIGH 3 /* rows of a tile: the sums of two chains are in registers */

typedef struct {
  int64_t o, begin, taken, first; /* outputs from o on; steps of 32 inputs from `begin` on, so many; rows from `first` on */
  const float *w;
  float *sums; /* [GROUP, 16 COLUMNS] */
} Transposed;
IN int64_t steps_of(const Job *job) { return job->width / 32; }
IN int64_t taken_from(const Job *job, int64_t begin) { return steps_of(job) - begin < BLOCK / 32 ? steps_of(job) - begin : BLOCK / 32; }
/* A block of W is [8 sums, steps, 2 chains, 16 COLUMNS] pairs; sums are so far apart that they are not all in the same sets of a cache. */
IN int64_t apart(int64_t taken) { return (taken * 2 * COLUMNS + 1) * 16; }
IN int64_t place_of(int64_t begin) { return begin / (BLOCK / 32) * 8 * apart(BLOCK / 32); }

IN void transpose_outputs(const Job *job, int64_t o, float *to) {
  const int64_t in = job->w->in, rest = job->w->out - o;
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  for (int c = 0; c < COLUMNS; c++, w += 16 * in)
    for (int64_t step = 0; step < steps_of(job); step++) {
      const int64_t begin = step / (BLOCK / 32) * (BLOCK / 32), k = 32 * step, n = in - k < 32 ? in - k : 32;
      float *at = to + place_of(begin) + ((step - begin) * 2 * COLUMNS + c) * 16;
      F v[16], y[16];
      if (n == 32 && 16 * c + 16 <= rest) {
        UNROLL for (int i = 0; i < 16; i++) v[i] = ld((const float *)(w + i * in + k));
      } else {
        for (int i = 0; i < 16; i++) v[i] = 16 * c + i < rest ? (F)ldcn(w + i * in + k, (int)(2 * n)) : all(0);
      }
      transpose16(v, y);
      UNROLL for (int l = 0; l < 16; l++) st(at + l / 2 * apart(taken_from(job, begin)) + l % 2 * 16 * COLUMNS, y[l]);
    }
}
#define FOR_HEIGHTS(rows, call) \
  switch (rows) { \
  case 1: call(1); break; \
  case 2: call(2); break; \
  default: call(HIGH); \
  }
/* Each pair of x is read where it lies: a block of a tile's rows is small, and stays in the first cache. */
IN void tile(const Job *job, const Transposed *a, int64_t row, const int r) {
  const int64_t wide = job->w->out - a->o, width = job->width / 2;
  const int is_last = a->begin + a->taken == steps_of(job);
  const float *w = a->w, *x = (const float *)job->x + row * width + 16 * a->begin;
  float *sums = a->sums + (row - a->first) * 16 * COLUMNS;
  for (int64_t at = 0; at < 16 * a->taken; at += 16) UNROLL for (int i = 0; i < r; i++) __builtin_prefetch(x + (i + r) * width + at, 0, 3);
  for (int sum = 0; sum < 8; sum++, w += apart(a->taken), x += 2) {
    F s[2][HIGH][COLUMNS];
    UNROLL for (int n = 0; n < 2; n++) UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < COLUMNS; j++) s[n][i][j] = all(0);
    for (int64_t k = 0; k < a->taken; k++)
      UNROLL for (int n = 0; n < 2; n++) {
        B v[COLUMNS];
        UNROLL for (int j = 0; j < COLUMNS; j++) v[j] = ldc(w + ((2 * k + n) * COLUMNS + j) * 16);
        UNROLL for (int i = 0; i < r; i++) {
          const B u = (B)all(x[i * width + 16 * k + n]);
          UNROLL for (int j = 0; j < COLUMNS; j++) s[n][i][j] = dot(s[n][i][j], v[j], u);
        }
      }
    const int is_new = a->begin == 0 && sum == 0;
    UNROLL for (int i = 0; i < r; i++) UNROLL for (int j = 0; j < COLUMNS; j++) {
      const int at = (i * COLUMNS + j) * 16;
      const F both = add(is_new ? all(0) : ld(sums + at), add(s[0][i][j], s[1][i][j]));
      if (!is_last || sum < 7) st(sums + at, both);
      else if (wide > 16 * j) put16(job, row + i, a->o + 16 * j, wide - 16 * j, both);
    }
  }
}
/* Tiles ask for their share of the weights that this thread transposes next, so that memory is not idle while they compute. */
void outputs_by_pairs(const Job *job, int64_t from, int64_t to) {
  const int64_t transposed = place_of(steps_of(job) + BLOCK / 32 - 1), stride = 2 * job->w->in;
  const int64_t tiles = (job->rows + HIGH - 1) / HIGH * ((steps_of(job) + BLOCK / 32 - 1) / (BLOCK / 32));
  float *w = scratch(4, sizeof(float) * (size_t)(transposed + GROUP * 16 * COLUMNS));
  Transposed a = {.sums = w + transposed};
  for (a.o = from; a.o < to; a.o += 16 * COLUMNS) {
    transpose_outputs(job, a.o, w);
    const int64_t next = a.o + 16 * COLUMNS < to ? a.o + 16 * COLUMNS : from + job->threads * job->block, rest = job->w->out - next;
    const int64_t bytes = rest > 16 * COLUMNS ? 16 * COLUMNS * stride : rest > 0 ? rest * stride : 0, share = (bytes / tiles + 64) & ~(int64_t)63;
    const char *ask = (const char *)job->w->w + next * stride, *enough = ask + bytes;
    for (a.first = 0; a.first < job->rows; a.first += GROUP)
      for (a.begin = 0; a.begin < steps_of(job); a.begin += a.taken) {
        a.taken = taken_from(job, a.begin);
        a.w = w + place_of(a.begin);
        for (int64_t row = a.first; row < job->rows && row < a.first + GROUP; row += HIGH) {
          for (const char *stop = ask + share; ask < stop && ask < enough; ask += 64) __builtin_prefetch(ask, 0, 2);
#define TILE(r) tile(job, &a, row, r)
          FOR_HEIGHTS(job->rows - row, TILE)
        }
      }
  }
}
#endif
