/* What is computed in the tiles of AMX, where the CPU has them. */
#pragma once
#include "job.h"

/* bfloat16 (amx.c), 8 bits (amx_codes.c) and blocks (amx_blocks.c), from so many rows on: x is packed in tile order, and outputs
   [from, to) of all rows */
#define AMX_ROWS 5
#define AMX_CODES 7
#define AMX_BLOCKS 24
void prepare_amx(Job *job);
void outputs_amx(const Job *job, int64_t from, int64_t to);
void prepare_amx_codes(Job *job, int threads);
void outputs_amx_codes(const Job *job, int64_t from, int64_t to);
void outputs_amx_blocks(const Job *job, int64_t from, int64_t to);
#ifdef __AMX_BF16__
#define HAS_AMX 1
/* Eight tiles, of 16 lines of 64 bytes, but for lines of `length` bytes in tile 6, and as many fours of lines in tile 7; leaves
   zeros in them */
IN void use_tiles(const int length) {
  const struct { /* as ldtilecfg reads it */
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  } shapes = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, (uint16_t)length, 64}, .lines = {16, 16, 16, 16, 16, 16, 16, (uint8_t)(length / 4)}};
  _tile_loadconfig(&shapes);
}
typedef float Sums[4][256]; /* of tiles 0 to 3, 16 by 16 each; of codes their bits are those of whole numbers */
/* Two times two of them, of which some may be missing; leaves zeros in the tiles. */
IN void take_sums(Sums sums, const int tall, const int wide) {
#define TAKE_TILE(n) { _tile_stored(n, sums[n], 64); _tile_zero(n); }
  TAKE_TILE(0)
  if (wide == 2) TAKE_TILE(1)
  if (tall == 2) TAKE_TILE(2)
  if (tall == 2 && wide == 2) TAKE_TILE(3)
}
/* Two tiles of a, or one, by two of b, or one: `dot` is the instruction. a: their lines are `a_line` and `a_next_line` bytes apart. */
#define ADD_PRODUCTS(dot, a, a_line, a_next, a_next_line, b, b_next, tall, wide) \
  { \
    _tile_loadd(4, a, a_line); \
    _tile_loadd(6, b, 64); \
    dot(0, 4, 6); \
    if (wide == 2) { \
      _tile_loadd(7, b_next, 64); \
      dot(1, 4, 7); \
    } \
    if (tall == 2) { \
      _tile_loadd(5, a_next, a_next_line); \
      dot(2, 5, 6); \
      if (wide == 2) dot(3, 5, 7); \
    } \
  }
/* call(..., tall, wide), numbers that it knows when it is compiled */
#define BY_TALL_AND_WIDE(two_tall, two_wide, call, ...) \
  if (two_tall && two_wide) call(__VA_ARGS__, 2, 2); \
  else if (two_tall) call(__VA_ARGS__, 2, 1); \
  else if (two_wide) call(__VA_ARGS__, 1, 2); \
  else call(__VA_ARGS__, 1, 1);
#else
#define HAS_AMX 0
#endif
/* Blocks that amx_blocks.c multiplies */
IN int is_tiled(const Job *job) { return HAS_AMX && job->w->form >= BLOCKS4 && job->rows >= AMX_BLOCKS; }
