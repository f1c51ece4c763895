/* Strips of outputs, over which the tiles of all rows pass.

   The outputs of a tile lie one after the other, or each is in a run of its own: of a piece's outputs the first tile takes the
   first one of each run, the next tile the second ones. Weights are then read at places that are far from each other, each from
   begin to end. AMD's CPUs follow such streams by themselves, and wait less than for rows that lie side by side, whatever is asked
   for ahead. */
#pragma once
#include "job.h"

/* What is asked for while tiles compute: for each line of a tile's outputs `lines` lines, `apart` bytes from each other; the next
   ones are `step` bytes on. What is `near` goes to the first cache, all else to the second one. */
typedef struct {
  const char *at;
  int lines;
  int64_t step, apart;
  int near;
} Next;
/* The tiles of all rows pass over a strip of outputs, and each pass asks for a share of the next strip, line after line into the
   second cache: memory sees one stream, and is not idle while later rows compute with weights that are there. */
IN Next share_of(const char *strip, int64_t bytes, int64_t pass, int64_t passes) {
  const int64_t shares = passes < C ? passes : C, first = C * pass / shares;
  const int lines = pass < shares ? (int)(C * (pass + 1) / shares - first) : 0;
  return (Next){strip + bytes * first / C, lines, lines * 64, 64};
}
/* The same for runs, `apart` bytes from each other */
IN Next share_of_runs(const char *run, int64_t apart, int64_t pass, int64_t passes) {
  const Next share = share_of(run, C * apart, pass, passes);
  return (Next){share.at, share.lines, 64, apart};
}
/* Where rows of a weight are longer than a page, memory follows four of them, not two, by itself if it is asked shortly before. */
#define PAGE 4096
IN Next along_rows(const char *w, const int outputs, int64_t stride) { return (Next){w + 512, outputs, 64, stride}; }
/* Runs that one pass reads: a little is asked for ahead in each, so that it does not wait where its next page begins. */
#define AHEAD_IN_RUNS(rows) ((rows) > 2 ? 3072 : 1024)
IN Next in_runs(const char *w, const int rows, const int runs, int64_t apart) { return (Next){w + AHEAD_IN_RUNS(rows), runs, 64, apart, 1}; }
#define ASK(line, j) \
  if ((j) < next.lines) { \
    const char *const line_ahead = next.at + (line) * next.step + (j) * next.apart; \
    if (next.near) __builtin_prefetch(line_ahead, 0, 3); \
    else __builtin_prefetch(line_ahead, 0, 2); \
  }

/* Strips of outputs, whose weights stay in the second cache while the tiles of all rows, of `tall` rows by `wide` outputs, pass;
   where x is larger than that, of some rows after others. Tile n takes outputs `apart` from each other, tile n + 1 those that are
   `step` on. `after`: what this thread reads after these outputs. One output streams 8 KB behind what is asked for. What no tile
   takes, `call`_SINGLE computes, output by output. */
#define ROWS(call, c, r) \
  { \
    const int64_t first_o = from + begin * step, next_o = from + end * step; \
    const char *w = (const char *)job->w->w + first_o * stride; \
    const char *ahead = end < tiles ? (const char *)job->w->w + next_o * stride : after; \
    Next next = (c) == 1 ? (Next){w + 8192, 1, 64, 0} \
                : runs   ? passes > 1 ? share_of_runs(ahead, apart * stride, pass, passes) : in_runs(w, r, c, apart * stride) \
                : !along ? share_of(ahead, (end - begin) * (c) * stride, pass, passes) \
                : pass   ? (Next){0} \
                         : along_rows(w, c, stride); \
    for (int64_t o = first_o; o < next_o; o += step, next.at += (runs ? 1 : next.lines) * stride) call(row, o, apart, r, c, next); \
    if (end == tiles) \
      for (int64_t o = from + tiles * (c); o < to; o++) \
        for (int q = 0; q < (r); q++) call##_SINGLE(row + q, o); \
    pass++; \
  }
#define STRIPS(call, a_stride, tall, wide) \
  { \
    const int64_t stride = a_stride, large = job->rows * stride > 1 << 20, most = large ? 16 * tall : job->rows, tiles = (to - from) / wide; \
    const int runs = job->runs && wide > 1 && job->rows <= 3 * tall; /* with more, to compute takes longer than to read */ \
    const int64_t apart = runs ? tiles : 1, step = runs ? 1 : wide; \
    const char *after = (const char *)job->w->w + (from + job->threads * job->block) * stride; \
    for (int64_t first = 0, rows; first < job->rows; first += rows) { \
      rows = first + most < job->rows ? most : job->rows - first; \
      const int64_t passes = (rows + tall - 1) / tall, width = runs && passes == 1 ? tiles : strip_of(large || wide == 1, passes, stride) / wide; \
      const int along = wide > 2 && stride > PAGE && passes <= 2; \
      for (int64_t begin = 0, end; begin == 0 || begin < tiles; begin = end) { \
        end = begin + width < tiles ? begin + width : tiles; \
        int64_t row = first; \
        int pass = 0; \
        EACH_TILE(row, first + rows, tall, ROWS, call, wide) \
        if (end == tiles) break; \
      } \
    } \
  }
#if OUTPUTS == 1 /* but few rows have tiles of several outputs */
#define ALL_ROWS(call, stride) \
  if (job->rows <= R) STRIPS(call, stride, R, C) \
  else STRIPS(call, stride, TALL, OUTPUTS)
#else
#define ALL_ROWS(call, stride) STRIPS(call, stride, TALL, OUTPUTS)
#endif
/* What is asked for ahead is short: two strips, of each thread, lie in the second cache. */
IN int64_t strip_of(int large, int64_t passes, int64_t stride) {
  const int64_t most = passes == 1 ? 4 * C : STRIP, some = 65536 / (stride ? stride : 1) / C * C;
  return large ? STRIP : some > most ? most : some < C ? C : some;
}
