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
  _tile_stored(0, sums[0], 64);
  _tile_zero(0);
  if (wide == 2) {
    _tile_stored(1, sums[1], 64);
    _tile_zero(1);
  }
  if (tall == 2) {
    _tile_stored(2, sums[2], 64);
    _tile_zero(2);
  }
  if (tall == 2 && wide == 2) {
    _tile_stored(3, sums[3], 64);
    _tile_zero(3);
  }
}
#else
#define HAS_AMX 0
#endif
/* Blocks that amx_blocks.c multiplies */
IN int is_tiled(const Job *job) { return HAS_AMX && job->w->form >= BLOCKS4 && job->rows >= AMX_BLOCKS; }
