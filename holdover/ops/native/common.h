// What the kernels share: bfloat16, exp, and rows read and written in either type.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>


static inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline uint16_t to_bf16(float x) {  // round to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// exp in single precision: 2^n times a polynomial, error under 2 units in the last place; written so that loops vectorise.
static inline float exp_single(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_single(-x)); }

// log(1 + exp(x)): log1p of y = exp(-|x|) as 2 artanh(y / (2 + y)), whose series ends soon because that is at most 1/3.
static inline float softplus(float x) {
    const float y = exp_single(-fabsf(x)), t = y / (2.0f + y), u = t * t;
    float p = 1.0f / 13.0f;
    p = fmaf(p, u, 1.0f / 11.0f);
    p = fmaf(p, u, 1.0f / 9.0f);
    p = fmaf(p, u, 1.0f / 7.0f);
    p = fmaf(p, u, 1.0f / 5.0f);
    p = fmaf(p, u, 1.0f / 3.0f);
    p = fmaf(p, u, 1.0f);
    return (x > 0.0f ? x : 0.0f) + 2.0f * t * p;
}

static inline void load_row(float *restrict to, const void *from, int64_t first, int n, int bf16) {
    if (bf16) {
        const uint16_t *x = (const uint16_t *)from + first;
        for (int i = 0; i < n; i++) to[i] = from_bf16(x[i]);
    } else {
        memcpy(to, (const float *)from + first, n * sizeof(float));
    }
}

static inline void store_row(void *to, int64_t first, const float *restrict from, int n, int bf16) {
    if (bf16) {
        uint16_t *y = (uint16_t *)to + first;
        for (int i = 0; i < n; i++) y[i] = to_bf16(from[i]);
    } else {
        memcpy((float *)to + first, from, n * sizeof(float));
    }
}
