/* One product of a call, and where its outputs go. */
#pragma once
#include "lanes.h"
#include "products.h"

int reads_runs(void); /* cpu.c */

#define X_AHEAD 768 /* numbers of x in the order of its tiles, between what is computed and what is asked for: of the next tile */
#define STRIP 64 /* outputs whose weights stay in the second cache while all rows pass */
/* Rows and outputs of a tile. With 16 registers, which hold 8 numbers each, one output and many rows: W is read from memory
   for all of them at once, and no sum is moved out of its register. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TALL 6
#define OUTPUTS 1
#else
#define TALL R
#define OUTPUTS C
#endif
/* call(..., r) for a tile of r rows, a number that it knows when it is compiled: the last one, of less than `tall`; the next one,
   of `tall` or less; all of them, from `row` on */
#define LAST_TILE(rest, tall, call, ...) \
  switch (rest) { \
  case 5: call(__VA_ARGS__, 5 < tall ? 5 : tall); break; \
  case 4: call(__VA_ARGS__, 4 < tall ? 4 : tall); break; \
  case 3: call(__VA_ARGS__, 3 < tall ? 3 : tall); break; \
  case 2: call(__VA_ARGS__, 2 < tall ? 2 : tall); break; \
  case 1: call(__VA_ARGS__, 1); break; \
  }
#define NEXT_TILE(rest, tall, call, ...) \
  if ((rest) >= tall) call(__VA_ARGS__, tall); \
  else LAST_TILE(rest, tall, call, __VA_ARGS__)
#define EACH_TILE(row, rows, tall, call, ...) \
  for (; row + tall <= rows; row += tall) call(__VA_ARGS__, tall); \
  LAST_TILE(rows - row, tall, call, __VA_ARGS__)

typedef struct {
  const Weight *w;
  const void *given; /* x as it came */
  const float *x;    /* float32, or NULL for codes; bfloat16.c: in the form that it needs */
  const int8_t *codes;
  const float *largest; /* CODES8: [N], of the row; blocks: [N, G, 2] scales and sums; by AMX [N / 16, G, 2, 16] */
  const int32_t *total; /* CODES8: [N], of a row's codes; blocks: [N, I / 16], what sums begin with */
  void *y;
  int type, threads, form; /* form: of x, in bfloat16.c */
  int runs;                /* whether a tile's outputs are in runs of their own, see tiles.h */
  int count, group; /* of few rows of [I, O]: sums, see `sums_of`, of parts that lie in groups */
  int64_t rows, width; /* of a row of codes, with its padding; bfloat16.c: of x */
  int64_t first, y_row; /* of y: where this product's numbers begin in a row, and how far rows are apart */
  float *parts;        /* of few rows: see `sums_of` */
  const float *packed; /* x in tile order, of [I, O] or transposed.c */
  int64_t length, block; /* inputs of a part; outputs of a piece */
  int64_t turn; /* amx.c: of x, that a thread lays out once */
  int pieces;
} Job;

/* Outputs of 16 bits are stored out of line: tiles have dozens of these places, and each would be compiled with all types. */
static __attribute__((noinline)) void put_short(const Job *j, int64_t at, float v) { set(j->y, at, j->type == BF16 ? BF16 : F16, v); }
IN void put(const Job *j, int64_t row, int64_t o, float v) {
  if (j->w->bias) v += j->w->bias[o];
  const int64_t at = row * j->y_row + j->first + o;
  if (j->type == F32) ((float *)j->y)[at] = v;
  else put_short(j, at, v);
}
IN void put4(const Job *j, int64_t row, int64_t o, int64_t apart, const float *v) { /* four outputs */
  float *to = (float *)j->y + row * j->y_row + j->first + o;
  if (j->type != F32 || apart != 1) for (int l = 0; l < 4; l++) put(j, row, o + l * apart, v[l]);
  else if (j->w->bias) for (int l = 0; l < 4; l++) to[l] = v[l] + j->w->bias[o + l];
  else memcpy(to, v, 16);
}
/* Sixteen outputs, or the first n of them */
static __attribute__((noinline)) void put_some(const Job *j, int64_t row, int64_t o, int64_t n, const float *v) {
  if (n >= 16 && j->type == BF16) {
    uint16_t *to = (uint16_t *)j->y + row * j->y_row + j->first + o;
    const float *bias = j->w->bias;
    for (int l = 0; l < 16; l++) to[l] = to_bf16(bias ? v[l] + bias[o + l] : v[l]);
    return;
  }
  for (int64_t l = 0; l < 16 && l < n; l++) put(j, row, o + l, v[l]);
}
IN void put16(const Job *j, int64_t row, int64_t o, int64_t n, F v) {
  if (n >= 16 && j->type == F32) {
    if (j->w->bias) v = add(v, ld(j->w->bias + o));
    st((float *)j->y + row * j->y_row + j->first + o, v);
    return;
  }
  float h[16];
  st(h, v);
  put_some(j, row, o, n, h);
}

/* A chain: so many inputs of r rows, packed in tile order, by columns 16 [begin, end) of lines of W are added to s; returns what
   follows in x. */
IN const float *chain(F s[TALL][C], const float *w, const int line, const float *x, int64_t count, const int r, const int begin, const int end) {
  for (int64_t k = 0; k < count; k++, w += line, x += r) {
    F v[C];
    UNROLL for (int j = begin; j < end; j++) v[j] = ld(w + 16 * j);
    __builtin_prefetch(x + X_AHEAD, 0, 3);
    UNROLL for (int i = 0; i < r; i++) {
      const F u = all(x[i]);
      UNROLL for (int j = begin; j < end; j++) s[i][j] = fma16(u, v[j], s[i][j]);
    }
  }
  return x;
}

IN B four(const void *p) { /* the same four bytes in every lane */
  int32_t bytes;
  memcpy(&bytes, p, 4);
  I lanes = iall(bytes);
  B b;
  memcpy(&b, &lanes, 64);
  return b;
}
IN F row_part(const Job *job, int64_t row, int64_t k) { /* of x as it came */
  const int64_t in = job->w->in, n = in - k;
  return part(job->given, row * in + k, n, job->type);
}

/* Few rows of [I, O]: sums [blocks of outputs, P, N, SUMS_ROW]. The numbers between the rows of a block keep them from lying in
   the same sets of a cache. */
#define SUMS_ROW(job) ((job)->block + 32)
IN float *sums_of(const Job *j, int64_t block, int64_t part) {
  return j->parts + (block * j->count + part) * j->rows * SUMS_ROW(j);
}

/* x [N, I] -> as float32 [N, width], with zeros behind the last input (products.c) */
void widen(void *job, int row);
/* float32 and float16 weights [I, O] (in_out.c): x is packed in tile order where there are many rows; all of the product */
void prepare_in_out(Job *job, int threads);
void in_out(Job *job);
/* float32 and float16 weights [O, I] where there are many rows (transposed.c): whether there are (of bfloat16, too), how many outputs
   a piece has;
   x is packed in tile order, and outputs [from, to) of all rows */
int is_transposed(const Job *job);
int64_t transposed_outputs(void);
void pack_transposed(Job *job, int threads);
void outputs_transposed(const Job *job, int64_t from, int64_t to);
/* Codes (codes.c): of numbers [k, stop) of a row, by their largest one, and their sum; a row; and outputs [from, to) of all rows */
void code8(void *job, int row);
int32_t coded(const Job *job, int64_t row, int64_t k, int64_t stop, float *largest, int8_t *to);
void codes8(const Job *job, int64_t from, int64_t to);
/* Blocks (blocks.c): the code that stands for 0, or for the offset; the scales of 16 outputs as float32 [I / 32, 2,
   16], the second of which are offsets, or those of the second half of a block, if there are such; a row of x, and outputs [from, to) of all rows */
IN int middle(const Weight *w) { return w->form == BLOCKS8 || w->type == RANGES || w->type == SIXES ? 0 : 1 << (w->form - 1); }
void widen_scales(const Weight *w, int64_t o, float *y);
void code_blocks(void *job, int row);
void blocks(const Job *job, int64_t from, int64_t to);
/* How a row of x lies for bfloat16 weights: as float32; as it came, for dot products; in the tiles of amx.c; or as those of
   bfloat16_transposed.c read them */
enum { WIDENED, PAIRED, TILED, TRANSPOSED };
/* bfloat16 weights [O, I] (bfloat16.c): x in the form that the product reads, and outputs [from, to) of all rows */
void copy_pairs(void *job, int row); /* of x, padded; for [I, O] with the second number before the first */
void prepare_bf16(Job *job);
void plain_bf16(const Job *job, int64_t from, int64_t to);
void pack_transposed_bf16(Job *job, int threads);
void outputs_transposed_bf16(const Job *job, int64_t from, int64_t to);
/* bfloat16 weights [I, O] (bfloat16_in_out.c): all of it */
#define PARTS_BF16 2
void in_out_bf16(Job *job);
