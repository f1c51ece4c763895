/* y = x W' + bias for bfloat16 weights [O, I] and many rows: 16 COLUMNS outputs after another are transposed, so that lanes are
   outputs and no lanes are added up.

   The bits are those of bfloat16.h: of each BLOCK inputs, chain l adds up what lane l takes there, chains 2 m and 2 m + 1 are
   added, and these eight sums are added to the output in turn. Where the CPU multiplies pairs (PAIRED) two such chains pass
   together; else (WIDENED) outputs are widened, and each chain takes the second number of a pair, then the first one. */
#include "bfloat16.h"
#include "transposed.h"

#define HALF 8 /* chains, whose weights stay in the first cache while all rows pass; by pairs as many sums of two */
#define HIGH 3 /* rows of a tile of pairs: the sums of two chains are in registers */

typedef struct {
  int64_t o, begin, taken, first; /* outputs from o on; steps of 16 numbers from `begin` on, so many; rows from `first` on */
  int chain;                      /* the first of HALF */
  const float *w;
  float *sums; /* [GROUP, 16 COLUMNS] */
} Transposed;
IN int64_t steps_of(const Job *job) { return job->width / 16; }
IN int64_t taken_from(const Job *job, int64_t begin) { return steps_of(job) - begin < BLOCK / 16 ? steps_of(job) - begin : BLOCK / 16; }
/* A block of W is [16 chains, steps, 16 COLUMNS], or [8 sums, steps / 2, 2 chains, 16 COLUMNS] pairs. Chains, or sums, are so far
   apart that they are not all in the same sets of a cache. */
IN int64_t apart(int64_t taken) { return (taken * COLUMNS + 1) * 16; }
IN int64_t place_of(int64_t begin, const int form) { return begin / (BLOCK / 16) * (form == PAIRED ? 8 : 16) * apart(BLOCK / 16); }

IN void transpose_outputs(const Job *job, int64_t o, float *to, const int form) {
  const int64_t in = job->w->in, rest = job->w->out - o;
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  for (int c = 0; c < COLUMNS; c++, w += 16 * in)
    for (int64_t k = 0; k < in; k += 32) {
      const int64_t begin = k / BLOCK * (BLOCK / 16), line = apart(taken_from(job, begin)), n = in - k < 32 ? in - k : 32;
      float *at = to + place_of(begin, form) + ((k / 16 - begin) * COLUMNS + c) * 16;
      B raw[16];
      F v[16], y[16];
      if (n == 32 && 16 * c + 16 <= rest) {
        UNROLL for (int i = 0; i < 16; i++) raw[i] = ldc(w + i * in + k);
      } else {
        for (int i = 0; i < 16; i++) raw[i] = 16 * c + i < rest ? ldcn(w + i * in + k, (int)(2 * n)) : ldcn(w, 0);
      }
      if (form == PAIRED) {
        memcpy(v, raw, sizeof v);
        transpose16(v, y);
        UNROLL for (int l = 0; l < 16; l++) st(at + l / 2 * line + l % 2 * 16 * COLUMNS, y[l]);
        continue;
      }
      UNROLL for (int half = 0; half < 2; half++) {
        UNROLL for (int i = 0; i < 16; i++) v[i] = half ? first(raw[i]) : second(raw[i]);
        transpose16(v, y);
        UNROLL for (int l = 0; l < 16; l++) st(at + l * line + half * 16 * COLUMNS, y[l]);
      }
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
PACK_TILE(pack)
void pack_transposed_bf16(Job *job, int threads) {
  job->packed = scratch(1, sizeof(float) * (size_t)(job->rows * job->width));
  pieces(pack_tile, job, (int)((job->rows + TALL - 1) / TALL), threads);
}

/* Of a row and 16 columns: what two chains came to is added to the output. */
IN void add_up(const Job *job, const Transposed *a, int64_t row, int column, F both, const int is_first, const int is_last) {
  const int64_t wide = job->w->out - a->o - 16 * column;
  float *at = a->sums + ((row - a->first) * COLUMNS + column) * 16;
  const F sum = add(is_first ? all(0) : ld(at), both);
  if (!is_last) st(at, sum);
  else if (wide > 0) put16(job, row, a->o + 16 * column, wide, sum);
}
IN void tile(const Job *job, const Transposed *a, int64_t row, const int r) {
  const int is_last = a->begin + a->taken == steps_of(job) && a->chain == HALF, is_first = a->begin == 0 && a->chain == 0;
  const float *w = a->w, *x = job->packed + (a->begin * 16 + a->chain * a->taken) * job->rows + row * HALF * a->taken;
  float even[TALL * COLUMNS * 16] __attribute__((aligned(64)));
  for (int number = 0; number < HALF; number++, w += apart(a->taken)) {
    F s[TALL][C];
    EACH_SUM(r, 0, COLUMNS) s[i][j] = all(0);
    x = chain(s, w, 16 * COLUMNS, x, a->taken, r, 0, COLUMNS);
    EACH_SUM(r, 0, COLUMNS) {
      float *at = even + (i * COLUMNS + j) * 16;
      if (number % 2 == 0) st(at, s[i][j]);
      else add_up(job, a, row + i, j, add(ld(at), s[i][j]), is_first && number == 1, is_last && number == HALF - 1);
    }
  }
}
/* Each pair of x is read where it lies: a block of a tile's rows is small, and stays in the first cache. */
IN void tile_of_pairs(const Job *job, const Transposed *a, int64_t row, const int r) {
  const int64_t width = job->width / 2;
  const int is_last = a->begin + a->taken == steps_of(job);
  const float *w = a->w, *x = (const float *)job->x + row * width + 8 * a->begin;
  for (int64_t at = 0; at < 8 * a->taken; at += 16) UNROLL for (int i = 0; i < r; i++) __builtin_prefetch(x + (i + r) * width + at, 0, 3);
  for (int sum = 0; sum < 8; sum++, w += apart(a->taken), x += 2) {
    F s[2][HIGH][COLUMNS];
    UNROLL for (int n = 0; n < 2; n++) EACH_SUM(r, 0, COLUMNS) s[n][i][j] = all(0);
    for (int64_t k = 0; k < a->taken; k += 2)
      UNROLL for (int n = 0; n < 2; n++) {
        B v[COLUMNS];
        UNROLL for (int j = 0; j < COLUMNS; j++) v[j] = ldc(w + ((k + n) * COLUMNS + j) * 16);
        UNROLL for (int i = 0; i < r; i++) {
          const B u = four(x + i * width + 8 * k + n);
          UNROLL for (int j = 0; j < COLUMNS; j++) s[n][i][j] = dot(s[n][i][j], v[j], u);
        }
      }
    EACH_SUM(r, 0, COLUMNS) add_up(job, a, row + i, j, add(s[0][i][j], s[1][i][j]), a->begin == 0 && sum == 0, is_last && sum == 7);
  }
}
IN void outputs_as(const Job *job, int64_t from, int64_t to, const int form) {
  const int64_t steps = steps_of(job), transposed = place_of(steps + BLOCK / 16 - 1, form), tall = form == PAIRED ? HIGH : TALL;
  const int64_t tiles = (job->rows + tall - 1) / tall * ((steps + BLOCK / 16 - 1) / (BLOCK / 16));
  float *w = scratch(4, sizeof(float) * (size_t)(transposed + GROUP * 16 * COLUMNS));
  Transposed a = {.sums = w + transposed};
  for (a.o = from; a.o < to; a.o += 16 * COLUMNS) {
    transpose_outputs(job, a.o, w, form);
    Asked asked = ask_after(job, a.o, from, to, 2 * job->w->in, tiles);
    for (a.first = 0; a.first < job->rows; a.first += GROUP)
      for (a.begin = 0; a.begin < steps; a.begin += a.taken) {
        a.taken = taken_from(job, a.begin);
        for (a.chain = 0; a.chain < (form == PAIRED ? HALF : 16); a.chain += HALF) {
          a.w = w + place_of(a.begin, form) + a.chain * apart(a.taken);
          for (int64_t row = a.first; row < job->rows && row < a.first + GROUP; row += tall) {
            if (form == PAIRED) {
              ask_share(&asked);
              NEXT_TILE(job->rows - row, HIGH, tile_of_pairs, job, &a, row)
            } else NEXT_TILE(job->rows - row, TALL, tile, job, &a, row)
          }
        }
      }
  }
}
void outputs_transposed_bf16(const Job *job, int64_t from, int64_t to) {
  if (HAS_PAIRS && job->type == BF16) outputs_as(job, from, to, PAIRED);
  else outputs_as(job, from, to, WIDENED);
}
