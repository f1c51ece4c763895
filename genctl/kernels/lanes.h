/* Sixteen lanes of float32, the unit in which every sum of this library is ordered, for each instruction set.

   F is 16 float32, I is 16 int32. Each operation rounds once, as IEEE 754 says, on every instruction set: so whatever is
   written in these operations gives the same bits everywhere. `fma` is always fused. The file is compiled once for each
   variant with the compiler's flags for it; nothing here looks at the CPU. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define IN static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define EACH_SUM(r, begin, end) UNROLL for (int i = 0; i < (r); i++) UNROLL for (int j = (begin); j < (end); j++) /* of a tile */
#if defined(__AVX2__) || defined(__aarch64__)
#define DEEP UNROLL /* loops over inputs */
#else
#define DEEP _Pragma("GCC unroll 2") /* in plain C an operation is dozens of instructions: compiling would take a minute */
#endif
enum { F32, BF16, F16 }; /* how numbers are stored */
#define FOR_TYPE(type, call, ...) /* call(..., type), which it then knows when it is compiled */ \
  switch (type) { \
  case F32: call(__VA_ARGS__, F32); break; \
  case BF16: call(__VA_ARGS__, BF16); break; \
  default: call(__VA_ARGS__, F16); \
  }

IN float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
IN uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
IN float from_bf16(uint16_t h) { return as_float((uint32_t)h << 16); }
IN uint16_t to_bf16(float f) { /* to the nearest, ties to even; a NaN stays one */
  const uint32_t u = as_bits(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}
#if defined(__F16C__) || defined(__aarch64__)
IN float from_f16(uint16_t h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return (float)f;
}
IN uint16_t to_f16(float f) {
  _Float16 h = (_Float16)f;
  uint16_t u;
  memcpy(&u, &h, 2);
  return u;
}
#else /* no instruction: a compiler would call a library for it, which a shared library has to bring */
IN float from_f16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t u = as_bits((float)rest * 0x1p-24f); /* below 2^-14 */
  if (rest >= 0x400) u = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
  if (rest > 0x7c00) u |= 0x400000; /* a quiet NaN */
  return as_float(u | sign);
}
IN uint16_t to_f16(float f) {
  uint32_t u = as_bits(f);
  const uint32_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x3ff));
  if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
  /* below 2^-14: numbers from 0.5 on are as far apart as those of float16 there */
  if (u < 0x38800000) return (uint16_t)(sign | (as_bits(as_float(u) + 0.5f) - 0x3f000000));
  u += 0xfff + (u >> 13 & 1); /* to the nearest, ties to even */
  return (uint16_t)(sign | (u - (112u << 23)) >> 13);
}
#endif
/* One number as it is stored */
IN float get(const void *p, ptrdiff_t at, int type) {
  if (type == F32) return ((const float *)p)[at];
  const uint16_t h = ((const uint16_t *)p)[at];
  return type == BF16 ? from_bf16(h) : from_f16(h);
}
IN void set(void *p, ptrdiff_t at, int type, float v) {
  if (type == F32) ((float *)p)[at] = v;
  else ((uint16_t *)p)[at] = type == BF16 ? to_bf16(v) : to_f16(v);
}
IN float rounded(float v, int type) { return type == F32 ? v : type == BF16 ? from_bf16(to_bf16(v)) : from_f16(to_f16(v)); }

#if defined(__AVX512F__) /* ------------------------------------------------------------------------- AVX-512, VNNI */
#include <immintrin.h>
#define R 6 /* rows and outputs whose sums stay in registers */
#define C 4
typedef __m512 F;
typedef __m512i I;
IN F ld(const float *p) { return _mm512_loadu_ps(p); }
IN F ldn(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
IN void st(float *p, F a) { _mm512_storeu_ps(p, a); }
IN void stn(float *p, F a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a); }
IN F all(float a) { return _mm512_set1_ps(a); }
#define OF_TWO(type, name, intrinsic) IN type name(type a, type b) { return intrinsic(a, b); }
#define OF_ONE(to, name, from, intrinsic) IN to name(from a) { return intrinsic(a); }
OF_TWO(F, add, _mm512_add_ps) OF_TWO(F, sub, _mm512_sub_ps) OF_TWO(F, mul, _mm512_mul_ps) OF_TWO(F, over, _mm512_div_ps)
IN F fma16(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
IN F nearest(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
IN F below(F a, F b, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes); }
IN F ordered(F a, F yes, F no) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q), no, yes); }
OF_ONE(I, bits, F, _mm512_castps_si512) OF_ONE(F, floats, I, _mm512_castsi512_ps)
OF_ONE(I, whole, F, _mm512_cvtps_epi32) OF_ONE(F, real, I, _mm512_cvtepi32_ps)
IN I iall(int32_t a) { return _mm512_set1_epi32(a); }
OF_TWO(I, iadd, _mm512_add_epi32) OF_TWO(I, isub, _mm512_sub_epi32)
OF_TWO(I, iand, _mm512_and_si512) OF_TWO(I, ior, _mm512_or_si512) OF_TWO(I, imax, _mm512_max_epi32)
IN I up23(I a) { return _mm512_slli_epi32(a, 23); }
IN I half(I a) { return _mm512_srai_epi32(a, 1); }
IN void ist(int32_t *p, I a) { _mm512_storeu_si512(p, a); }
IN void stb(int8_t *p, I a) { _mm_storeu_si128((void *)p, _mm512_cvtepi32_epi8(a)); } /* numbers of 8 bits */
IN int32_t largest(I a) { return _mm512_reduce_max_epi32(a); }
IN F wide_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
IN F ldb(const uint16_t *p) { return wide_bf16(_mm256_loadu_si256((const void *)p)); }
IN F ldh(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
IN __m256 sum_of_halves(F v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
IN __m256i isum_of_halves(I v) { return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)); }
typedef __m512i B; /* 64 bytes */
IN B ldc(const void *p) { return _mm512_loadu_si512(p); }
IN B ldcn(const void *p, int n) { return _mm512_maskz_loadu_epi8(n >= 64 ? ~0ull : (1ull << n) - 1, p); }
IN B nibbles(const uint8_t *p) {
  __m256i raw = _mm256_loadu_si256((const void *)p), low = _mm256_set1_epi8(15);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(raw, low)), _mm256_and_si256(_mm256_srli_epi16(raw, 4), low), 1);
}
IN B above(B low, B high, const int at, const int bits) {
  const B moved = at < 4 ? _mm512_slli_epi16(high, 4 - at) : _mm512_srli_epi16(high, at - 4);
  return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8((16 << bits) - 16)));
}
IN I ldi(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)); }
#elif defined(__AVX2__) /* -------------------------------------------------------------------- AVX2, FMA; AVX-VNNI */
#include <immintrin.h>
#define R 3
#define C 2
typedef struct { __m256 a, b; } F;
typedef struct { __m256i a, b; } I;
#define EACH(type, expression_a, expression_b) ((type){expression_a, expression_b})
IN F ld(const float *p) { return EACH(F, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
IN void st(float *p, F v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
IN F all(float v) { return EACH(F, _mm256_set1_ps(v), _mm256_set1_ps(v)); }
#define OF_TWO(type, name, intrinsic) IN type name(type x, type y) { return EACH(type, intrinsic(x.a, y.a), intrinsic(x.b, y.b)); }
#define OF_ONE(to, name, from, intrinsic) IN to name(from v) { return EACH(to, intrinsic(v.a), intrinsic(v.b)); }
OF_TWO(F, add, _mm256_add_ps) OF_TWO(F, sub, _mm256_sub_ps) OF_TWO(F, mul, _mm256_mul_ps) OF_TWO(F, over, _mm256_div_ps)
IN F fma16(F x, F y, F z) { return EACH(F, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
IN F nearest(F v) { return EACH(F, _mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
IN F below(F x, F y, F yes, F no) { return EACH(F, _mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)), _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))); }
IN F ordered(F x, F yes, F no) { return EACH(F, _mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, x.a, _CMP_ORD_Q)), _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, x.b, _CMP_ORD_Q))); }
OF_ONE(I, bits, F, _mm256_castps_si256) OF_ONE(F, floats, I, _mm256_castsi256_ps)
OF_ONE(I, whole, F, _mm256_cvtps_epi32) OF_ONE(F, real, I, _mm256_cvtepi32_ps)
IN I iall(int32_t v) { return EACH(I, _mm256_set1_epi32(v), _mm256_set1_epi32(v)); }
OF_TWO(I, iadd, _mm256_add_epi32) OF_TWO(I, isub, _mm256_sub_epi32)
OF_TWO(I, iand, _mm256_and_si256) OF_TWO(I, ior, _mm256_or_si256) OF_TWO(I, imax, _mm256_max_epi32)
IN I up23(I v) { return EACH(I, _mm256_slli_epi32(v.a, 23), _mm256_slli_epi32(v.b, 23)); }
IN I half(I v) { return EACH(I, _mm256_srai_epi32(v.a, 1), _mm256_srai_epi32(v.b, 1)); }
IN void ist(int32_t *p, I v) { _mm256_storeu_si256((void *)p, v.a); _mm256_storeu_si256((void *)(p + 8), v.b); }
IN void stb(int8_t *p, I v) {
  const __m256i h = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
  _mm_storeu_si128((void *)p, _mm_packs_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}
IN int32_t largest(I v) {
  const __m256i h = _mm256_max_epi32(v.a, v.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
IN __m256 ldb8(const uint16_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16)); }
IN F ldb(const uint16_t *p) { return EACH(F, ldb8(p), ldb8(p + 8)); }
IN F ldh(const uint16_t *p) { return EACH(F, _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8)))); }
IN __m256 sum_of_halves(F v) { return _mm256_add_ps(v.a, v.b); }
IN __m256i isum_of_halves(I v) { return _mm256_add_epi32(v.a, v.b); }
typedef struct { __m256i a, b; } B;
IN B ldc(const void *p) { return EACH(B, _mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)); }
IN B nibbles(const uint8_t *p) {
  __m256i raw = _mm256_loadu_si256((const void *)p), low = _mm256_set1_epi8(15);
  return EACH(B, _mm256_and_si256(raw, low), _mm256_and_si256(_mm256_srli_epi16(raw, 4), low));
}
IN __m256i moved(__m256i high, const int at, const int bits) {
  return _mm256_and_si256(at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4), _mm256_set1_epi8((char)((16 << bits) - 16)));
}
IN B above(B low, B high, const int at, const int bits) { return EACH(B, _mm256_or_si256(low.a, moved(high.a, at, bits)), _mm256_or_si256(low.b, moved(high.b, at, bits))); }
IN I ldi(const int8_t *p) { return EACH(I, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p + 8)))); }
#elif defined(__aarch64__) /* --------------------------------------------------------------------------------- NEON */
#include <arm_neon.h>
#define R 3
#define C 2
typedef struct { float32x4_t v[4]; } F;
typedef struct { int32x4_t v[4]; } I;
typedef struct { int8x16_t v[4]; } B;
#define FOUR UNROLL for (int q = 0; q < 4; q++)
IN F ld(const float *p) { F r; FOUR r.v[q] = vld1q_f32(p + 4 * q); return r; }
IN void st(float *p, F a) { FOUR vst1q_f32(p + 4 * q, a.v[q]); }
IN F all(float a) { F r; FOUR r.v[q] = vdupq_n_f32(a); return r; }
#define OF_TWO(type, name, intrinsic) IN type name(type a, type b) { FOUR a.v[q] = intrinsic(a.v[q], b.v[q]); return a; }
#define OF_ONE(to, name, from, intrinsic) IN to name(from a) { to r; FOUR r.v[q] = intrinsic(a.v[q]); return r; }
OF_TWO(F, add, vaddq_f32) OF_TWO(F, sub, vsubq_f32) OF_TWO(F, mul, vmulq_f32) OF_TWO(F, over, vdivq_f32)
IN F fma16(F a, F b, F c) { FOUR c.v[q] = vfmaq_f32(c.v[q], a.v[q], b.v[q]); return c; }
OF_ONE(F, nearest, F, vrndnq_f32)
IN F below(F a, F b, F yes, F no) { FOUR a.v[q] = vbslq_f32(vcltq_f32(a.v[q], b.v[q]), yes.v[q], no.v[q]); return a; }
IN F ordered(F a, F yes, F no) { FOUR a.v[q] = vbslq_f32(vceqq_f32(a.v[q], a.v[q]), yes.v[q], no.v[q]); return a; }
OF_ONE(I, bits, F, vreinterpretq_s32_f32) OF_ONE(F, floats, I, vreinterpretq_f32_s32)
OF_ONE(I, whole, F, vcvtnq_s32_f32) OF_ONE(F, real, I, vcvtq_f32_s32)
IN I iall(int32_t a) { I r; FOUR r.v[q] = vdupq_n_s32(a); return r; }
OF_TWO(I, iadd, vaddq_s32) OF_TWO(I, isub, vsubq_s32)
OF_TWO(I, iand, vandq_s32) OF_TWO(I, ior, vorrq_s32) OF_TWO(I, imax, vmaxq_s32)
IN I up23(I a) { FOUR a.v[q] = vshlq_n_s32(a.v[q], 23); return a; }
IN I half(I a) { FOUR a.v[q] = vshrq_n_s32(a.v[q], 1); return a; }
IN void ist(int32_t *p, I a) { FOUR vst1q_s32(p + 4 * q, a.v[q]); }
IN void stb(int8_t *p, I a) {
  const int16x8_t low = vmovn_high_s32(vmovn_s32(a.v[0]), a.v[1]), high = vmovn_high_s32(vmovn_s32(a.v[2]), a.v[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
}
IN int32_t largest(I a) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3]))); }
IN F ldb(const uint16_t *p) { F r; FOUR r.v[q] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * q), 16)); return r; }
IN F ldh(const uint16_t *p) { F r; FOUR r.v[q] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * q))); return r; }
IN B ldc(const void *p) { B r; FOUR r.v[q] = vld1q_s8((const int8_t *)p + 16 * q); return r; }
IN B nibbles(const uint8_t *p) {
  B r;
  for (int q = 0; q < 2; q++) {
    uint8x16_t raw = vld1q_u8(p + 16 * q);
    r.v[q] = vreinterpretq_s8_u8(vandq_u8(raw, vdupq_n_u8(15)));
    r.v[q + 2] = vreinterpretq_s8_u8(vshrq_n_u8(raw, 4));
  }
  return r;
}
IN B above(B low, B high, const int at, const int bits) {
  const uint8x16_t mask = vdupq_n_u8((uint8_t)((16 << bits) - 16));
  FOUR low.v[q] = vorrq_s8(low.v[q], vreinterpretq_s8_u8(vandq_u8(vshlq_u8(vreinterpretq_u8_s8(high.v[q]), vdupq_n_s8((int8_t)(4 - at))), mask)));
  return low;
}
IN I ldi(const int8_t *p) { I r; FOUR { int32_t v[4] = {p[4 * q], p[4 * q + 1], p[4 * q + 2], p[4 * q + 3]}; r.v[q] = vld1q_s32(v); } return r; }
#else /* ---------------------------------------------------------------------------------------------------- plain C */
#define R 2
#define C 2
typedef struct { float v[16]; } F;
typedef struct { int32_t v[16]; } I;
typedef struct { int8_t v[64]; } B;
#define SIXTEEN for (int l = 0; l < 16; l++)
/* a * b + c rounded once: the product is exact in double; their sum is rounded to odd there, which rounds rightly to float
   (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd") */
IN float fused(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
  return __builtin_fmaf(a, b, c);
#else
  double p = (double)a * b, s = p + c, t = s - p, e = (p - (s - t)) + (c - t);
  int64_t u;
  memcpy(&u, &s, 8);
  int64_t odd = (e != 0) & (e == e) & !(u & 1); /* inexact and even: the neighbour on the side of what was lost */
  u += odd ? (((e > 0) == (s > 0)) ? 1 : -1) : 0;
  memcpy(&s, &u, 8);
  return (float)s;
#endif
}
IN F ld(const float *p) { F r; memcpy(&r, p, 64); return r; }
IN void st(float *p, F a) { memcpy(p, &a, 64); }
IN F all(float a) { F r; SIXTEEN r.v[l] = a; return r; }
#define OF_TWO(type, name, operator) IN type name(type a, type b) { SIXTEEN a.v[l] operator b.v[l]; return a; }
OF_TWO(F, add, +=) OF_TWO(F, sub, -=) OF_TWO(F, mul, *=) OF_TWO(F, over, /=)
IN F fma16(F a, F b, F c) { SIXTEEN c.v[l] = fused(a.v[l], b.v[l], c.v[l]); return c; }
/* below 2^22 the addition leaves whole numbers, to the nearest and even; what is larger is not rounded anywhere here */
IN F nearest(F a) { SIXTEEN { float t = a.v[l] + 12582912.0f; a.v[l] = t - 12582912.0f; } return a; }
IN F below(F a, F b, F yes, F no) { SIXTEEN no.v[l] = a.v[l] < b.v[l] ? yes.v[l] : no.v[l]; return no; }
IN F ordered(F a, F yes, F no) { SIXTEEN no.v[l] = a.v[l] == a.v[l] ? yes.v[l] : no.v[l]; return no; }
IN I bits(F a) { I r; memcpy(&r, &a, 64); return r; }
IN F floats(I a) { F r; memcpy(&r, &a, 64); return r; }
IN I whole(F a) { I r; a = nearest(a); SIXTEEN r.v[l] = (int32_t)a.v[l]; return r; }
IN F real(I a) { F r; SIXTEEN r.v[l] = (float)a.v[l]; return r; }
IN I iall(int32_t a) { I r; SIXTEEN r.v[l] = a; return r; }
OF_TWO(I, iadd, +=) OF_TWO(I, isub, -=) OF_TWO(I, iand, &=) OF_TWO(I, ior, |=)
IN I imax(I a, I b) { SIXTEEN a.v[l] = a.v[l] > b.v[l] ? a.v[l] : b.v[l]; return a; }
IN I up23(I a) { SIXTEEN a.v[l] = (int32_t)((uint32_t)a.v[l] << 23); return a; }
IN I half(I a) { SIXTEEN a.v[l] >>= 1; return a; }
IN void ist(int32_t *p, I a) { memcpy(p, &a, 64); }
IN void stb(int8_t *p, I a) { SIXTEEN p[l] = (int8_t)a.v[l]; }
IN int32_t largest(I a) { int32_t m = a.v[0]; SIXTEEN m = a.v[l] > m ? a.v[l] : m; return m; }
IN F ldb(const uint16_t *p) { F r; SIXTEEN r.v[l] = from_bf16(p[l]); return r; }
IN F ldh(const uint16_t *p) { F r; SIXTEEN r.v[l] = from_f16(p[l]); return r; }
IN B ldc(const void *p) { B r; memcpy(&r, p, 64); return r; }
IN B nibbles(const uint8_t *p) { B r; for (int m = 0; m < 32; m++) { r.v[m] = p[m] & 15; r.v[m + 32] = p[m] >> 4; } return r; }
IN B above(B low, B high, const int at, const int bits) {
  for (int m = 0; m < 64; m++) low.v[m] |= (int8_t)(((uint8_t)high.v[m] >> at << 4) & ((16 << bits) - 16));
  return low;
}
IN I ldi(const int8_t *p) { I r; SIXTEEN r.v[l] = p[l]; return r; }
#endif

/* -- what is the same for all of them ------------------------------------------------------------------------------ */

/* Step q of the codes that `nibbles` and, in front of them, `bits` - 4 more bits of each make: `above` puts bits [at, at + bits)
   of the bytes of `high` above four others */
IN B codes_of(const uint8_t *p, const int q, const int bits) {
  const B low = nibbles(p + 64 * (bits - 4) + 32 * q);
  return bits == 4 ? low : above(low, ldc(p + q * (bits - 4) / 8 * 64), q * (bits - 4) % 8, bits - 4);
}

#ifndef __AVX512F__
IN F ldn(const float *p, int n) {
  float part[16] = {0};
  memcpy(part, p, sizeof(float) * (size_t)n);
  return ld(part);
}
IN void stn(float *p, F a, int n) {
  float part[16];
  st(part, a);
  memcpy(p, part, sizeof(float) * (size_t)n);
}
IN B ldcn(const void *p, int n) {
  int8_t part[64] = {0};
  memcpy(part, p, (size_t)(n < 64 ? n : 64));
  return ldc(part);
}
#endif

/* The sum of 16 lanes, always as ((l, l + 8), + 4, + 2, + 1); four at once where that is faster. */
#if defined(__AVX512F__) || defined(__AVX2__)
IN __m128 quarter(F v) {
  const __m256 h = sum_of_halves(v);
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}
IN __m128i iquarter(I v) {
  const __m256i h = isum_of_halves(v);
  return _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
}
IN float tree(F v) {
  __m128 q = quarter(v);
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
IN void tree4(F a, F b, F c, F d, float *y) {
  __m128 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  __m128 pq = _mm_add_ps(_mm_movelh_ps(p, q), _mm_movehl_ps(q, p)), rs = _mm_add_ps(_mm_movelh_ps(r, s), _mm_movehl_ps(s, r));
  _mm_storeu_ps(y, _mm_add_ps(_mm_shuffle_ps(pq, rs, 0x88), _mm_shuffle_ps(pq, rs, 0xdd)));
}
IN void itree4(I a, I b, I c, I d, int32_t *y) {
  __m128i pq = _mm_hadd_epi32(iquarter(a), iquarter(b)), rs = _mm_hadd_epi32(iquarter(c), iquarter(d));
  _mm_storeu_si128((void *)y, _mm_hadd_epi32(pq, rs));
}
#ifdef __AVX512F__
/* The trees of 16 at once, of number 4 j + i to y[4 i + j]: each step adds up the lanes of two vectors in one. */
IN void tree16(const F *v, float *y) {
  F p[8], q[4];
  UNROLL for (int i = 0; i < 8; i++) p[i] = add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
  UNROLL for (int i = 0; i < 4; i++) q[i] = add(_mm512_shuffle_f32x4(p[2 * i], p[2 * i + 1], 0x88), _mm512_shuffle_f32x4(p[2 * i], p[2 * i + 1], 0xdd));
  UNROLL for (int i = 0; i < 2; i++) p[i] = add(_mm512_shuffle_ps(q[2 * i], q[2 * i + 1], 0x44), _mm512_shuffle_ps(q[2 * i], q[2 * i + 1], 0xee));
  st(y, add(_mm512_shuffle_ps(p[0], p[1], 0x88), _mm512_shuffle_ps(p[0], p[1], 0xdd)));
}
#endif
#else
IN float tree(F v) {
  float h[16];
  st(h, v);
  for (int n = 8; n; n /= 2)
    for (int l = 0; l < n; l++) h[l] += h[l + n];
  return h[0];
}
IN void tree4(F a, F b, F c, F d, float *y) { y[0] = tree(a); y[1] = tree(b); y[2] = tree(c); y[3] = tree(d); }
IN int32_t itree(I v) {
  int32_t h[16], sum = 0;
  ist(h, v);
  for (int l = 0; l < 16; l++) sum += h[l];
  return sum;
}
IN void itree4(I a, I b, I c, I d, int32_t *y) { y[0] = itree(a); y[1] = itree(b); y[2] = itree(c); y[3] = itree(d); }
#endif
#ifndef __AVX512F__
IN void tree16(const F *v, float *y) { UNROLL for (int i = 0; i < 4; i++) tree4(v[i], v[4 + i], v[8 + i], v[12 + i], y + 4 * i); }
#endif

/* 16 stored numbers, or the first n of them and zeros, as float32 */
IN F load(const void *p, ptrdiff_t at, int type) {
  return type == F32 ? ld((const float *)p + at) : type == BF16 ? ldb((const uint16_t *)p + at) : ldh((const uint16_t *)p + at);
}
IN F loadn(const void *p, ptrdiff_t at, int type, int n) {
  if (type == F32) return ldn((const float *)p + at, n);
#if defined(__AVX512F__)
  const __m256i short16 = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), (const uint16_t *)p + at);
  return type == BF16 ? wide_bf16(short16) : _mm512_cvtph_ps(short16);
#endif
  uint16_t part[16] = {0};
  memcpy(part, (const uint16_t *)p + at, 2 * (size_t)n);
  return type == BF16 ? ldb(part) : ldh(part);
}
/* The next 16 numbers of so many, which may be none */
IN F part(const void *p, ptrdiff_t at, int64_t left, int type) {
  return left >= 16 ? load(p, at, type) : left > 0 ? loadn(p, at, type, (int)left) : all(0);
}
IN void keep(void *p, ptrdiff_t at, int64_t left, F v, int type) {
  float h[16];
  if (type != F32) st(h, v);
  if (type == F32 && left >= 16) st((float *)p + at, v);
  else if (type == F32) stn((float *)p + at, v, (int)left);
  else if (left >= 16) for (int l = 0; l < 16; l++) set(p, at + l, type, h[l]);
  else for (int l = 0; l < left; l++) set(p, at + l, type, h[l]);
}
IN float highest(F v) {
  float h[16];
  st(h, v);
  for (int l = 1; l < 16; l++) h[0] = h[l] > h[0] ? h[l] : h[0];
  return h[0];
}
IN F absolute(F a) { return floats(iand(bits(a), iall(0x7fffffff))); }
IN F signed_as(F a, F b) { return floats(ior(bits(a), iand(bits(b), iall((int32_t)0x80000000)))); } /* a positive number with the sign of b */

/* ((p x + more[0]) x + more[1]) ...: a polynomial of degree n from its first coefficient on, or from what is known of it */
IN F polynomial(F x, F p, const int n, const float *more) {
  UNROLL for (int i = 0; i < n; i++) p = fma16(p, x, all(more[i]));
  return p;
}

/* e^x, within 1.1 units in the last place (Cephes expf, Moshier 1989; the argument is reduced by multiples of ln 2) */
IN F exp16(F x) {
  F low = below(x, all(-110.0f), all(-110.0f), x), t = below(all(100.0f), low, all(100.0f), low);
  F n = nearest(mul(t, all(1.44269504088896341f))), r = fma16(n, all(-0.693359375f), t);
  r = fma16(n, all(2.12194440e-4f), r);
  static const float more[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  F p = polynomial(r, all(1.9875691500e-4f), 5, more);
  p = add(fma16(p, mul(r, r), r), all(1.0f));
  I whole_n = whole(n), h = half(whole_n); /* 2^n in two steps: neither overflows, and the last one rounds once */
  F y = mul(mul(p, floats(up23(iadd(h, iall(127))))), floats(up23(iadd(isub(whole_n, h), iall(127)))));
  return ordered(x, y, x);
}

/* tanh, within 1.5 units in the last place (Cephes tanhf) */
IN F tanh16(F x) {
  F z = mul(x, x), t = absolute(x);
  static const float more[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
  F p = polynomial(z, all(-5.70498872745e-3f), 4, more);
  F near = fma16(mul(p, z), x, x);
  F far = sub(all(1.0f), over(all(2.0f), add(exp16(add(t, t)), all(1.0f))));
  far = signed_as(far, x);
  return ordered(x, below(t, all(0.625f), near, far), x);
}
/* The error function, within 1.5 units in the last place (polynomials of N. Juffa, stackoverflow.com/a/35148199) */
IN F erf16(F x) {
  F t = absolute(x), z = mul(x, x);
  F r = fma16(all(-1.72853470e-5f), t, all(3.83197126e-4f)), u = fma16(all(-3.88396438e-3f), t, all(2.42546219e-2f));
  static const float of_far[] = {-1.06777877e-1f, -6.34846687e-1f, -1.28717512e-1f};
  static const float of_near[] = {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f};
  r = fma16(polynomial(t, fma16(r, z, u), 3, of_far), t, sub(all(0.0f), t));
  F far = sub(all(1.0f), exp16(r));
  far = below(all(4.0f), t, all(1.0f), far);
  far = signed_as(far, x);
  F near = fma16(polynomial(z, all(-5.96761703e-4f), 5, of_near), x, x);
  return ordered(x, below(all(0.927734375f), t, far, near), x);
}
