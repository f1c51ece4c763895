/* Many rows of bfloat16 by the CPU's tiles (AMX): tdpbf16ps adds up 16 first numbers of pairs, and 16 second ones, each in turn
   and from 0 on, adds the two sums, and adds that to the output. That is the order of bfloat16.h, if first numbers are those
   of lane 2m, and second numbers those of lane 2m + 1.

   A block of BLOCK inputs is 8 such steps. Of 16 rows or outputs a step takes one tile, 1 KB, and the tiles of 16 rows lie one
   after another: x [N / 16, steps, 16 rows, 16 pairs], a panel of W [O / 16, steps, 16 pairs, 16 outputs]. */
#ifdef __AMX_BF16__
#include "bfloat16.h"
#include "job.h"

#define TILE 512 /* numbers */
/* Of two pairs the second number of each, then the first number of each: what is next in lanes 2m and 2m + 1 */
IN B in_turn(B v) {
  const B order = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 6, 7, 0, 1, 4, 5, 10, 11, 14, 15, 8, 9, 12, 13));
  return _mm512_shuffle_epi8(v, order);
}
IN int64_t steps(const Job *job) { return (job->w->in + BLOCK - 1) / BLOCK * 8; }

static void pack_row(void *p, int row) {
  const Job *job = p;
  const int64_t in = job->w->in, count = steps(job);
  uint16_t *to = (uint16_t *)job->x + row / 16 * count * TILE + row % 16 * 32;
  const uint16_t *from = (const uint16_t *)job->given + row * in;
  const __m512i vectors = _mm512_setr_epi64(0, 8, 16, 24, 32, 40, 48, 56); /* a quarter of a lane of each of the 8 vectors */
  uint16_t rest[BLOCK];
  for (int64_t k = 0; k < in; k += BLOCK) {
    const uint16_t *x = from + k;
    if (row >= job->rows || k + BLOCK > in) {
      memset(rest, 0, sizeof rest);
      if (row < job->rows) memcpy(rest, x, 2 * (size_t)(in - k));
      x = rest;
    }
    for (int m = 0; m < 8; m++, to += TILE) _mm512_storeu_si512(to, in_turn(_mm512_i64gather_epi64(vectors, x + 4 * m, 8)));
  }
}
void prepare_amx(Job *job) {
  const int64_t rows = (job->rows + 15) & ~(int64_t)15;
  job->x = scratch(0, 2 * (size_t)(rows / 16 * steps(job) * TILE));
  pieces(pack_row, job, (int)rows, rows * job->w->in > 1 << 15 ? job->threads : 1);
}

/* 32 inputs of 16 outputs, `apart` numbers from each other -> two lines of each of 8 tiles */
IN void pack_lines(const uint16_t *w, int64_t apart, uint16_t *to) {
  UNROLL for (int q = 0; q < 4; q++) {
    __m512i v[4];
    UNROLL for (int a = 0; a < 4; a++) { /* four pairs of outputs a, a + 4, a + 8, a + 12 */
#define FOUR_PAIRS(h) _mm_loadu_si128((const void *)(w + (a + 4 * (h)) * apart + 8 * q))
      v[a] = _mm512_castsi128_si512(FOUR_PAIRS(0));
      v[a] = _mm512_inserti32x4(v[a], FOUR_PAIRS(1), 1);
      v[a] = _mm512_inserti32x4(v[a], FOUR_PAIRS(2), 2);
      v[a] = in_turn(_mm512_inserti32x4(v[a], FOUR_PAIRS(3), 3));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), low23 = _mm512_unpacklo_epi32(v[2], v[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(v[0], v[1]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
    uint16_t *tile = to + 2 * q * TILE;
    _mm512_storeu_si512(tile, _mm512_unpacklo_epi64(low01, low23));
    _mm512_storeu_si512(tile + 32, _mm512_unpackhi_epi64(low01, low23));
    _mm512_storeu_si512(tile + TILE, _mm512_unpacklo_epi64(high01, high23));
    _mm512_storeu_si512(tile + TILE + 32, _mm512_unpackhi_epi64(high01, high23));
  }
}
/* A block of 16 outputs from o on, those from `to` on as zeros -> 8 tiles; asks for that of outputs `ahead` of these */
static void pack_block(const Job *job, int64_t o, int64_t to, int64_t k, int64_t ahead, uint16_t *lines) {
  const int64_t in = job->w->in, stop = k + BLOCK;
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  uint16_t rest[16 * 32];
  for (; k < stop; k += 32, lines += 64) {
    for (int l = 0; l < 16; l++) _mm_prefetch(w + (ahead + l) * in + k, _MM_HINT_T1);
    if (k + 32 <= in && o + 16 <= to) {
      pack_lines(w + k, in, lines);
      continue;
    }
    const int64_t n = in - k < 32 ? in - k : 32;
    memset(rest, 0, sizeof rest);
    for (int64_t l = 0; l < 16 && o + l < to && n > 0; l++) memcpy(rest + 32 * l, w + l * in + k, 2 * (size_t)n);
    pack_lines(rest, 32, lines);
  }
}

IN __m256i rounded(F v) { /* as to_bf16 does */
  const __m512i u = _mm512_castps_si512(v), even = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), even), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(up, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), 0x7fc0));
}
/* 16 rows by 16 outputs -> y */
static void write(const Job *job, int64_t row, int64_t o, int64_t to, const float *sums) {
  const __mmask16 there = (__mmask16)(to - o >= 16 ? 0xffff : (1u << (to - o)) - 1);
  const F bias = job->w->bias ? _mm512_maskz_loadu_ps(there, job->w->bias + o) : all(0);
  uint16_t *y = (uint16_t *)job->y + row * job->y_row + job->first + o;
  for (int64_t i = 0; i < 16 && row + i < job->rows; i++, y += job->y_row) {
    F v = ld(sums + 16 * i);
    if (job->w->bias) v = add(v, bias);
    _mm256_mask_storeu_epi16(y, there, rounded(v));
  }
}

/* Rows by outputs, in tiles: tall 2 and wide 2, or one of them 1. The tiles of the second half of x and w lie `far` away. */
IN void multiply(const uint16_t *x, int64_t x_far, const uint16_t *w, int64_t w_far, int64_t size, const int tall, const int wide) {
  for (int64_t at = 0; at < size; at += TILE) {
    _tile_loadd(4, x + at, 64);
    _tile_loadd(6, w + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (wide == 2) {
      _tile_loadd(7, w + w_far + at, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (tall == 2) {
      _tile_loadd(5, x + x_far + at, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (wide == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
}
/* Sums -> y, and the tiles are zeros again */
IN void finish(const Job *job, int64_t row, int64_t o, int64_t to, const int tall, const int wide) {
  float sums[256] __attribute__((aligned(64)));
  _tile_stored(0, sums, 64);
  write(job, row, o, to, sums);
  _tile_zero(0);
  if (wide == 2) {
    _tile_stored(1, sums, 64);
    write(job, row, o + 16, to, sums);
    _tile_zero(1);
  }
  if (tall == 2) {
    _tile_stored(2, sums, 64);
    write(job, row + 16, o, to, sums);
    _tile_zero(2);
  }
  if (tall == 2 && wide == 2) {
    _tile_stored(3, sums, 64);
    write(job, row + 16, o + 16, to, sums);
    _tile_zero(3);
  }
}
/* Up to 32 rows: a block of W is multiplied as soon as it is packed. */
IN void few_rows(const Job *job, int64_t from, int64_t to, const int tall) {
  const int64_t size = steps(job) * TILE, each = 8 * TILE;
  uint16_t w[2 * 8 * TILE] __attribute__((aligned(64)));
  for (int64_t o = from; o < to; o += 32) {
    for (int64_t k = 0; k < job->w->in; k += BLOCK) {
      pack_block(job, o, to, k, 32, w);
      if (o + 16 < to) pack_block(job, o + 16, to, k, 32, w + each);
      const uint16_t *x = (const uint16_t *)job->x + k / BLOCK * each;
      if (o + 16 < to) multiply(x, size, w, each, each, tall, 2);
      else multiply(x, size, w, each, each, tall, 1);
    }
    if (o + 16 < to) finish(job, 0, o, to, tall, 2);
    else finish(job, 0, o, to, tall, 1);
  }
}
/* More: all outputs are packed first, and 32 rows after 32 pass. */
IN void all_outputs(const Job *job, int64_t row, int64_t from, int64_t to, const uint16_t *w, const int tall) {
  const int64_t size = steps(job) * TILE;
  const uint16_t *x = (const uint16_t *)job->x + row / 16 * size;
  int64_t o = from;
  for (; o + 16 < to; o += 32, w += 2 * size) {
    multiply(x, size, w, size, size, tall, 2);
    finish(job, row, o, to, tall, 2);
  }
  if (o < to) {
    multiply(x, size, w, size, size, tall, 1);
    finish(job, row, o, to, tall, 1);
  }
}
static void many_rows(const Job *job, int64_t from, int64_t to) {
  const int64_t size = steps(job) * TILE, panels = (to - from + 15) / 16, rows = job->rows;
  uint16_t *w = scratch(5, 2 * (size_t)(panels * size)), *panel = w;
  for (int64_t o = from; o < to; o += 16, panel += size)
    for (int64_t k = 0; k < job->w->in; k += BLOCK) pack_block(job, o, to, k, 16, panel + k / BLOCK * 8 * TILE);
  for (int64_t row = 0; row < rows; row += 32) {
    if (row + 16 < rows) all_outputs(job, row, from, to, w, 2);
    else all_outputs(job, row, from, to, w, 1);
  }
}
typedef struct { /* as ldtilecfg reads it */
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t lines[16];
} Shapes;
void plain_amx(const Job *job, int64_t from, int64_t to) {
  Shapes shapes = {.palette = 1};
  for (int n = 0; n < 8; n++) shapes.bytes[n] = 64, shapes.lines[n] = 16;
  _tile_loadconfig(&shapes); /* leaves zeros in the tiles */
  if (job->rows <= 16) few_rows(job, from, to, 1);
  else if (job->rows <= 32) few_rows(job, from, to, 2);
  else many_rows(job, from, to);
  _tile_release();
}
#endif
