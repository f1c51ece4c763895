/* Which variants this CPU can run, and what this file was built from. Compiled without any instruction beyond the baseline's
   need in the variant that is loaded first. */
#include <stdatomic.h>
#include <string.h>
#ifndef SOURCES
#define SOURCES "unknown"
#endif
const char *built_from(void) { return SOURCES; } /* their digest, and the variants that were compiled */

#if defined(__x86_64__)
#include <cpuid.h>
static unsigned long long states(void) { /* registers that the operating system saves */
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (unsigned long long)high << 32 | low;
}
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
static int tiles_are_permitted(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; } /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
#else
static int tiles_are_permitted(void) { return 0; }
#endif
int runs(const char *variant) {
  unsigned a, b, c, d, c1, a7, b7, c7, d7;
  if (!strcmp(variant, "plain")) return 1;
  if (!__get_cpuid(1, &a, &b, &c1, &d) || !(c1 >> 27 & 1)) return 0; /* OSXSAVE */
  const unsigned long long saved = states();
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const int avx2 = (saved & 6) == 6 && (c1 >> 28 & 1) && (c1 >> 12 & 1) && (c1 >> 29 & 1) && (b >> 5 & 1) && (b >> 3 & 1) && (b >> 8 & 1); /* AVX, FMA, F16C, AVX2, BMI, BMI2 */
  if (!strcmp(variant, "avx2")) return avx2;
  if (a < 1 || !__get_cpuid_count(7, 1, &a7, &b7, &c7, &d7)) a7 = 0;
  if (!strcmp(variant, "avxvnni")) return avx2 && (a7 >> 4 & 1);
  const int avx512 = avx2 && (saved & 0xe6) == 0xe6 && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 28 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 11 & 1); /* F, DQ, CD, BW, VL, VNNI */
  if (!strcmp(variant, "avx512")) return avx512;
  if (!strcmp(variant, "avx512bf16")) return avx512 && (a7 >> 5 & 1);
  if (strcmp(variant, "amx")) return 0;
  return avx512 && (a7 >> 5 & 1) && (saved >> 17 & 3) == 3 && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && tiles_are_permitted(); /* AVX512_BF16; BF16, TILE, INT8 */
}
static unsigned vendor(void) { /* a part of its name */
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) ? b : 0;
}
/* Whether a variant that runs is faster than the next one. Intel's vdpbf16ps has half the speed of multiplications in float32. */
int suits(const char *variant) { return strcmp(variant, "avx512bf16") || vendor() != signature_INTEL_ebx; }
#else
int suits(const char *variant) { return variant != 0; }
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
int runs(const char *variant) { return !strcmp(variant, "neon") || (!strcmp(variant, "dotprod") && (getauxval(AT_HWCAP) >> 20 & 1)); }
#elif defined(__aarch64__)
int runs(const char *variant) { return !strcmp(variant, "neon") || !strcmp(variant, "dotprod"); }
#else
int runs(const char *variant) { return !strcmp(variant, "plain"); }
#endif
#endif

/* Whether this CPU follows several runs of a weight by itself (tiles.h): 1, 0, or -1 as long as nobody asked. Tests set it. */
atomic_int follows_runs = -1;
int reads_runs(void) {
  int known = atomic_load_explicit(&follows_runs, memory_order_relaxed);
  if (known < 0) {
#if defined(__x86_64__)
    known = vendor() == signature_AMD_ebx;
#else
    known = 0;
#endif
    atomic_store_explicit(&follows_runs, known, memory_order_relaxed);
  }
  return known;
}
