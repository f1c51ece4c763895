/* Many rows of 8-bit codes by the CPU's tiles (AMX): tdpbssd adds up four exact products at a time, so sums have no order.

   A tile of W is 16 outputs by 64 inputs as they lie: nothing of W is packed. x is packed once: panels of 16 rows, of each 64
   inputs a tile of 1 KB, [16 fours of inputs, 16 rows, 4]. So a tile of sums is [16 outputs, 16 rows], and is transposed when it
   is written. */
#ifdef __AMX_BF16__
#include "amx.h"
#include "tiles.h"
#include "transposed.h"

#define TILE 1024 /* bytes */

static void pack(void *p, int panel) {
  const Job *job = p;
  const int64_t width = job->width, row = (int64_t)panel * 16, rows = job->rows - row;
  int8_t *to = (int8_t *)job->x + row * width;
  for (int64_t k = 0; k < width; k += 64, to += TILE) {
    F v[16], y[16];
    UNROLL for (int i = 0; i < 16; i++) v[i] = floats(i < rows ? ldc(job->codes + (row + i) * width + k) : iall(0));
    transpose16(v, y);
    UNROLL for (int i = 0; i < 16; i++) st((float *)to + 16 * i, y[i]);
  }
}
void prepare_amx_codes(Job *job, int threads) {
  const int panels = (int)((job->rows + 15) / 16);
  job->x = scratch(3, (size_t)(panels * 16 * job->width));
  pieces(pack, job, panels, threads);
}

/* A tile of outputs [o, to) and 64 inputs of them: as they lie, or a copy with zeros where some are missing. */
IN const int8_t *tile_of(const Job *job, int64_t o, int64_t to, int64_t k, int8_t *copy, int64_t *stride) {
  const int64_t in = job->w->in, inputs = in - k < 64 ? in - k : 64;
  const int8_t *w = (const int8_t *)job->w->w + o * in + k;
  if (inputs == 64 && o + 16 <= to) {
    *stride = in;
    return w;
  }
  memset(copy, 0, TILE);
  for (int64_t l = 0; l < 16 && o + l < to; l++) memcpy(copy + 64 * l, w + l * in, (size_t)inputs);
  *stride = 64;
  return copy;
}
IN void write(const Job *job, int64_t row, int64_t o, int64_t to, const float *sums) {
  const int n = to - o < 16 ? (int)(to - o) : 16;
  const F scale = ldn(job->w->scale + o, n);
  F v[16], y[16];
  UNROLL for (int i = 0; i < 16; i++) v[i] = ld(sums + 16 * i);
  transpose16(v, y);
  UNROLL for (int i = 0; i < 16; i++)
    if (row + i < job->rows) put16(job, row + i, o, n, mul(mul(real(bits(y[i])), scale), all(job->largest[row + i])));
}
/* Up to 32 outputs of up to 32 rows. While it computes it asks for lines of the outputs that come next, or where rows of W are
   longer than a page for what comes next in them. */
IN void multiply(const Job *job, int64_t row, int64_t o, int64_t to, const Next next, const int tall, const int wide) {
  const int64_t width = job->width;
  const int8_t *x = (const int8_t *)job->x + row * width;
  const char *ahead = next.at;
  int8_t copy[2][TILE] __attribute__((aligned(64)));
  Sums sums __attribute__((aligned(64)));
  int64_t line, next_line = 64;
  for (int64_t k = 0; k < width; k += 64, x += TILE) {
    if (job->w->in < PAGE) for (int l = 0; l < 8 * next.lines; l++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    else if (row == 0) for (int l = 0; l < 16 * wide; l++) __builtin_prefetch((const char *)job->w->w + (o + l) * job->w->in + k + 128, 0, 2);
    const int8_t *w = tile_of(job, o, to, k, copy[0], &line), *w_next = wide == 2 ? tile_of(job, o + 16, to, k, copy[1], &next_line) : w;
    ADD_PRODUCTS(_tile_dpbssd, w, line, w_next, next_line, x, x + 16 * width, wide, tall)
  }
  take_sums(sums, wide, tall);
  for (int n = 0; n < 4; n++)
    if (n / 2 < wide && n % 2 < tall) write(job, row + n % 2 * 16, o + n / 2 * 16, to, sums[n]);
}
void outputs_amx_codes(const Job *job, int64_t from, int64_t to) {
  use_tiles(64);
  /* where x is larger than the second cache, a panel of it serves more outputs */
  const int64_t in = job->w->in, passes = (job->rows + 31) / 32, width = job->rows * job->width > 1 << 21 ? 256 : 32;
  for (int64_t begin = from, end; begin < to; begin = end) {
    end = begin + width < to ? begin + width : to;
    const char *strip = (const char *)job->w->w + (end < to ? end : from + job->threads * job->block) * in;
    for (int64_t pass = 0; pass < passes; pass++)
      for (int64_t o = begin; o < end; o += 32) {
        const Next next = share_of(strip + (o - begin) * in, 32 * in, pass, passes);
        const int64_t row = 32 * pass;
        BY_TALL_AND_WIDE(row + 16 < job->rows, o + 16 < end, multiply, job, row, o, end, next)
      }
  }
  _tile_release();
}
#endif
