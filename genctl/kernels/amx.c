/* Many rows of bfloat16 by the CPU's tiles (AMX): tdpbf16ps adds up 16 first numbers of pairs, and 16 second ones, each in turn
   and from 0 on, adds the two sums, and adds that to the output. That is the order of bfloat16.h, if first numbers are those
   of lane 2m, and second numbers those of lane 2m + 1.

   Weights [I, O] (bfloat16_in_out.c): first numbers of pairs are those of the first chain. A step is 32 inputs, in turn.
   Weights [O, I]: a block of BLOCK inputs is 8 steps. Of 16 rows or outputs a step takes one tile, 1 KB, and the tiles of 16
   rows lie one after another: x [N / 16, steps, 16 rows, 16 pairs], a panel of W [O / 16, steps, 16 pairs, 16 outputs]. */
#ifdef __AMX_BF16__
#include "amx.h"
#include "bfloat16.h"

#define TILE 512 /* numbers */
#define NEXT 128 /* inputs whose weights [I, O] are asked for ahead */
/* Of two pairs the second number of each, then the first number of each: what is next in lanes 2m and 2m + 1 */
IN B in_turn(B v) {
  const B order = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 6, 7, 0, 1, 4, 5, 10, 11, 14, 15, 8, 9, 12, 13));
  return _mm512_shuffle_epi8(v, order);
}
IN __m512i pairs_of(B v) { /* numbers l and l + 16 side by side */
  const __m512i step = _mm512_set1_epi32(0x00010001), first_two = _mm512_set1_epi32(16 << 16);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_permutexvar_epi16(_mm512_add_epi32(_mm512_mullo_epi32(lanes, step), first_two), v);
}
IN int is_in_out(const Job *job) { return job->w->form == IN_OUT; }
IN int64_t steps(const Job *job) { return is_in_out(job) ? (job->w->in + 31) / 32 : (job->w->in + BLOCK - 1) / BLOCK * 8; }
IN int64_t part_steps(const Job *job) { return is_in_out(job) ? job->length / 32 : steps(job); }

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
    const int64_t left = (in - k + 31) / 32, some = left < 8 ? left : 8;
    for (int m = 0; m < some && is_in_out(job); m++, to += TILE) _mm512_storeu_si512(to, pairs_of(ldc(x + 32 * m)));
    for (int m = 0; m < 8 && !is_in_out(job); m++, to += TILE) _mm512_storeu_si512(to, in_turn(_mm512_i64gather_epi64(vectors, x + 4 * m, 8)));
  }
}
IN int64_t padded(const Job *job) { return (job->rows + 15) & ~(int64_t)15; }
IN float *room_for_x(const Job *job) { return scratch(0, 2 * (size_t)(padded(job) / 16 * steps(job) * TILE)); }
/* Many rows are packed by every thread for itself: what another core has just written comes slowly, tile by tile. But not so
   many that each would hold more than 8 MB. */
IN int is_shared(const Job *job) { return job->rows <= 32 || job->rows * job->w->in > 1 << 22; }
void prepare_amx(Job *job) {
  static _Atomic int64_t turns;
  job->turn = ++turns;
  if (!is_shared(job)) return;
  job->x = room_for_x(job);
  pieces(pack_row, job, (int)padded(job), padded(job) * job->w->in > 1 << 15 ? job->threads : 1);
}
static const uint16_t *own_x(const Job *job) {
  static _Thread_local int64_t packed_turn;
  if (is_shared(job)) return (const uint16_t *)job->x;
  Job own = *job;
  own.x = room_for_x(job);
  for (int row = 0; row < padded(job) && packed_turn != job->turn; row++) pack_row(&own, row);
  packed_turn = job->turn;
  return (const uint16_t *)own.x;
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
/* [O, I]: 32 inputs, of which `part` of a block says which, of 16 outputs from o on, those from `to` on as zeros; asks for those of
   the block at `next` */
IN void pack_part(const Job *job, int64_t o, int64_t to, int64_t step, int part, const uint16_t *next, uint16_t *block) {
  const int64_t in = job->w->in, k = 32 * (step + part);
  const uint16_t *w = (const uint16_t *)job->w->w + o * in;
  uint16_t *lines = block + 64 * part;
  for (int l = 0; l < 16; l++) _mm_prefetch(next + l * in + 32 * part, _MM_HINT_T1);
  if (k + 32 <= in && o + 16 <= to) {
    pack_lines(w + k, in, lines);
    return;
  }
  const int64_t n = in - k < 0 ? 0 : in - k < 32 ? in - k : 32;
  uint16_t rest[16 * 32];
  memset(rest, 0, sizeof rest);
  for (int64_t l = 0; l < 16 && o + l < to; l++) memcpy(rest + 32 * l, w + l * in + k, 2 * (size_t)n);
  pack_lines(rest, 32, lines);
}
static void pack_block(const Job *job, int64_t o, int64_t to, int64_t step, const uint16_t *next, uint16_t *block) {
  for (int part = 0; part < 8; part++) pack_part(job, o, to, step, part, next, block);
}
/* What is packed two blocks after this one: further ahead would not stay in the caches. */
IN const uint16_t *two_later(const Job *job, int64_t o, int64_t step) {
  const int64_t blocks = steps(job) / 8, block = step / 8 + 2;
  return (const uint16_t *)job->w->w + (o + block / blocks * 16) * job->w->in + block % blocks * BLOCK;
}
IN __mmask16 which(int64_t o, int64_t to) { return (__mmask16)(to - o >= 16 ? 0xffff : (1u << (to - o)) - 1); }
/* All inputs of outputs [o, to): rows of W are read along, and each leaves a line in every panel. */
static void pack_panels(const Job *job, int64_t from, int64_t to, uint16_t *panels) {
  const int64_t in = job->w->in, out = job->w->out, panel = steps(job) * TILE;
  for (int64_t k = 0; k < in; k += 32)
    for (int64_t d = k; d < k + 16; d++, panels += 32) {
      const uint16_t *w = (const uint16_t *)job->w->w + d * out;
      uint16_t *line = panels;
      for (int64_t o = from; o < to; o += 16, line += panel) {
        const __mmask16 there = which(o, to);
        if (!(o & 16)) _mm_prefetch(w + NEXT * out + o, _MM_HINT_T1), _mm_prefetch(w + (NEXT + 16) * out + o, _MM_HINT_T1);
        const __m256i one = _mm256_maskz_loadu_epi16(d < in ? there : 0, w + o);
        const __m256i other = _mm256_maskz_loadu_epi16(d + 16 < in ? there : 0, w + 16 * out + o);
        _mm512_storeu_si512(line, pairs_of(_mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1)));
      }
    }
}

#define ROUNDING __attribute__((target("avx512bf16"))) /* which every CPU with these tiles has */
ROUNDING IN __m256i to_bf16s(F v) { /* as to_bf16 does; numbers below 2^-126 are 0 here */
  return _mm256_mask_set1_epi16((__m256i)_mm512_cvtneps_pbh(v), _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), 0x7fc0);
}
/* The sums of parts are added in turn, and to the bias -> y */
ROUNDING static void write(const Job *job, int64_t row, int64_t o, int64_t to, const Sums *sums, int parts, int tile) {
  const __mmask16 there = which(o, to);
  const F bias = job->w->bias ? _mm512_maskz_loadu_ps(there, job->w->bias + o) : all(0);
  uint16_t *y = (uint16_t *)job->y + row * job->y_row + job->first + o;
  for (int64_t i = 0; i < 16 && row + i < job->rows; i++, y += job->y_row) {
    F v = ld(sums[0][tile] + 16 * i);
    for (int part = 1; part < parts; part++) v = add(v, ld(sums[part][tile] + 16 * i));
    if (job->w->bias) v = add(v, bias);
    _mm256_mask_storeu_epi16(y, there, to_bf16s(v));
  }
}

/* Rows by outputs, in tiles: tall 2 and wide 2, or one of them 1. The tiles of the second half of x and w lie `far` away. */
IN void multiply_step(const uint16_t *x, int64_t x_far, const uint16_t *w, int64_t w_far, const int tall, const int wide) {
  ADD_PRODUCTS(_tile_dpbf16ps, x, 64, x + x_far, 64, w, w + w_far, tall, wide)
}
IN void multiply(const uint16_t *x, int64_t x_far, const uint16_t *w, int64_t w_far, int64_t size, const int tall, const int wide) {
  for (int64_t at = 0; at < size; at += TILE) {
    for (int l = 0; l < TILE; l += 32) { /* the panel comes from the second cache */
      _mm_prefetch(w + at + 4 * TILE + l, _MM_HINT_T0);
      if (wide == 2) _mm_prefetch(w + w_far + at + 4 * TILE + l, _MM_HINT_T0);
    }
    multiply_step(x + at, x_far, w + at, w_far, tall, wide);
  }
}
IN void finish(const Job *job, int64_t row, int64_t o, int64_t to, const Sums *sums, int parts, const int tall, const int wide) {
  for (int n = 0; n < 4; n++)
    if (n % 2 < wide && n / 2 < tall) write(job, row + n / 2 * 16, o + n % 2 * 16, to, sums, parts, n);
}
/* [O, I] and up to 32 rows: while a block of W is packed the one before it is multiplied, part by part, as the instruction's sum
   comes late. */
IN void few_rows(const Job *job, int64_t from, int64_t to, const int tall) {
  const int64_t count = steps(job), last = (to - from + 15) / 16 * count;
  const uint16_t *x = (const uint16_t *)job->x;
  uint16_t w[2][8 * TILE] __attribute__((aligned(64)));
  Sums sums __attribute__((aligned(64)));
  for (int64_t step = 0, ready = -8; ready < last; ready = step, step += 8) {
    uint16_t *packed = w[step / 8 % 2], *before = w[1 - step / 8 % 2];
    const int64_t o = from + step / count * 16, at = step % count, done = ready % count;
    const uint16_t *next = two_later(job, o, at);
    for (int part = 0; part < 8; part++) {
      if (step < last) pack_part(job, o, to, at, part, next, packed);
      if (ready >= 0) multiply_step(x + (done + part) * TILE, count * TILE, before + part * TILE, 0, tall, 1);
    }
    if (ready < 0 || done + 8 < count) continue;
    take_sums(sums, tall, 1);
    finish(job, 0, from + ready / count * 16, to, &sums, 1, tall, 1);
  }
}
/* Else all outputs are packed first, and 32 rows after 32 pass. */
IN void many(const Job *job, const uint16_t *x, int64_t row, int64_t o, int64_t to, const uint16_t *w, const int tall, const int wide) {
  const int64_t count = steps(job), each = part_steps(job);
  Sums sums[PARTS_BF16] __attribute__((aligned(64)));
  int parts = 0;
  for (int64_t part = 0; part < count; part += each) {
    const int64_t end = part + each < count ? part + each : count;
    multiply(x + part * TILE, count * TILE, w + part * TILE, count * TILE, (end - part) * TILE, tall, wide);
    take_sums(sums[parts++], tall, wide);
  }
  finish(job, row, o, to, sums, parts, tall, wide);
}
static void many_rows(const Job *job, int64_t from, int64_t to) {
  const int64_t count = steps(job), panels = (to - from + 15) / 16, rows = job->rows;
  uint16_t *w = scratch(5, 2 * (size_t)(panels * count * TILE)), *panel = w;
  if (is_in_out(job)) pack_panels(job, from, to, w);
  for (int64_t o = from; o < to && !is_in_out(job); o += 16, panel += count * TILE)
    for (int64_t step = 0; step < count; step += 8) pack_block(job, o, to, step, two_later(job, o, step), panel + step * TILE);
  const uint16_t *x = own_x(job);
  for (int64_t row = 0; row < rows; row += 32, x += 2 * count * TILE) {
    panel = w;
    for (int64_t o = from; o < to; o += 32, panel += 2 * count * TILE)
      BY_TALL_AND_WIDE(row + 16 < rows, o + 16 < to, many, job, x, row, o, to, panel)
  }
}
void outputs_amx(const Job *job, int64_t from, int64_t to) {
  use_tiles(64);
  if (job->rows <= 16 && !is_in_out(job)) few_rows(job, from, to, 1);
  else if (job->rows <= 32 && !is_in_out(job)) few_rows(job, from, to, 2);
  else many_rows(job, from, to);
  _tile_release();
}
#endif
