/* The border of the library: plain C types, called through ctypes. Sizes are numbers, not bytes, unless said. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* -- threads (threads.c) -- */
typedef void (*Piece)(void *job, int number);
void pieces(Piece work, void *job, int count, int threads); /* every piece once, by whichever thread is free */
void *scratch(int slot, size_t bytes);                      /* memory of this thread, kept for the next call */

/* -- products (products.c) -- */
/* A weight [O, I]; [I, O]; 8 bits [O, I]; blocks of 32 numbers by 16 outputs, [O / 16, I / 32, 64 bits], whose form is the number of
   bits. In 8 bits a block is [8 fours of inputs, 16 outputs, 4]. Else of each 64 codes 32 bytes have the lower halves: byte b that of
   code b, and above it that of code b + 32; in front of the eight times 32 bytes 64 bytes, in 6 bits two times 64, have what codes
   have above 4 bits: those of the first 64 codes in the lowest bits of all bytes, and so on. */
enum { PLAIN, IN_OUT, CODES8, BLOCKS4 = 4, BLOCKS5, BLOCKS6, BLOCKS8 = 8 };
/* The scales of blocks, in `range`.
     HALVES: float16 [O / 16, I / 32, 16], w = code * scale, where codes of less than 8 bits are half their range too large.
     RANGES: float16 [O / 16, I / 32, 2, 16], w = code * scale + offset.
     SHORTS: the same in bfloat16, w = (code - 8) * scale + offset.
     SIXES: [O / 16, I / 256, 256], as RANGES: numbers of 6 bits [8, 2, 16] as the codes above, and between what is above 4 bits and
       what is below float16 [2, 16], by which scales and offsets are multiplied.
     SIXTEENS: [O / 16, I / 256, 288], a scale for each half of a block, as HALVES: int8 [8, 2, 16], and float16 [16], by which they
       are multiplied. */
enum { HALVES, RANGES, SHORTS, SIXES, SIXTEENS };
typedef struct {
  int32_t form, type; /* type: of PLAIN and IN_OUT (lanes.h), and of the scales of blocks */
  int64_t in, out;
  const void *w;
  const float *scale;    /* CODES8: [O] */
  const void *range;     /* of blocks */
  const float *bias;     /* [O] or NULL */
} Weight;
/* x [N, I] -> y [N, O1 + O2 + ...]: products of the same x, whose weights have one form, and are all IN_OUT or none is */
#define MOST_PRODUCTS 4
void products(const Weight *const *w, int32_t count, const void *x, void *y, int64_t rows, int32_t type, int32_t threads);

/* -- attention (attention.c): y [N, F, H, D] = softmax(q k' scaling + bias) v over the columns that a token sees, and a sink -- */
typedef struct {
  int32_t type, causal;
  int64_t rows, heads, kv_heads, fed, size; /* N, H, K, F, D: H / K query heads share one of keys and values */
  const void *q;
  int64_t q_row, q_head, q_token;
  const void *k[2], *v[2]; /* the columns, in at most two stretches of memory, one after the other */
  int64_t columns[2], each; /* rows N / each of keys and values: `each` rows in turn see the same one */
  const int64_t *of;        /* [N] the row of keys and values that each row sees, or NULL: by `each` */
  int64_t k_row[2], k_head[2], k_column[2], v_row[2], v_head[2], v_column[2];
  const uint8_t *mask; /* which columns are there, or NULL: all */
  int64_t mask_row;
  int64_t window; /* the newest columns that a token sees, or 0: all */
  float scaling, softcap;
  const float *bias;
  int64_t bias_row, bias_head, bias_token;
  const float *sinks; /* [H] or NULL: a score that every token sees, and that belongs to no column */
  void *y;
} Attention;
void attention(const Attention *a, int32_t threads);

/* -- norms and activations (small.c) -- */
void rms_norm(const void *x, const float *weight, float eps, void *y, int64_t rows, int64_t size, int32_t type, int32_t late, int32_t threads);
void layer_norm(const void *x, const float *weight, const float *bias, float eps, void *y, int64_t rows, int64_t size, int64_t period, int32_t type, int32_t threads);
void activate(int32_t kind, const void *x, int64_t x_row, const void *up, int64_t up_row, void *y, int64_t rows, int64_t size, int32_t type, int32_t threads);

/* -- numbers of blocks as they lie in a file (small.c) -- */
typedef struct {
  int32_t numbers, bytes, bits, scales; /* of a block, and the bits of a code */
  int32_t low, high, halves;            /* bytes of a block before the codes' lower halves, what is above them, and the scale */
} Layout;
/* Rows of raw [O, I] -> y [count, I]; 0 if there is no such row */
int32_t unpack(const Layout *how, const uint8_t *raw, int64_t out, int64_t in, const int64_t *rows, int64_t count, float *y);

/* -- many calls at once (steps.c): a pass over N rows of F tokens, of which the last `keep` have logits -- */
enum { PRODUCTS, RMS_NORM, LAYER_NORM, ACTIVATE, SUM, COPY, TURN, ATTENTION };
/* What a call does with each token, so that a list serves any N and F for which its buffers have room. */
typedef struct {
  int32_t kind, type, how, kept; /* how: products, activation, late, interleaved; kept: the last `keep` tokens of each row alone */
  float eps, factor;
  int64_t count, size, period, heads, turned; /* count: norms of a token */
  const void *x, *z, *w; /* z: up; what is added; cosines. w: weights, or an `Attention`; sines */
  const float *weight, *bias;
  void *y;
  int64_t x_token, z_token, y_token, x_head, y_head;
  int64_t z_row, y_row; /* of angles; of a cache, or 0: rows lie one after the other */
  const int64_t *places; /* [2, N] of a cache: the row and the column to which each row goes, or NULL: in their order */
} Call;
void run(const Call *calls, int32_t count, int64_t rows, int64_t fed, int64_t keep, int32_t threads);
