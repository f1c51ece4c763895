/* What is computed in the tiles of AMX, where the CPU has them. */
#ifndef AMX_H
#define AMX_H
#include "job.h"

#ifdef __AMX_BF16__
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
#else
#define AMX_CODES INT64_MAX
#define AMX_BLOCKS INT64_MAX
#endif
/* Blocks that amx_blocks.c multiplies */
IN int is_tiled(const Job *job) { return job->w->form >= BLOCKS8 && job->rows >= AMX_BLOCKS; }
#endif
