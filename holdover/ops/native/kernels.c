// Kimi delta attention on the CPU, from the short convolution to the gated norm, for a batch of unlike sequences.
//
// One task is one head of one sequence. It runs the recurrence token by token, so that a state does not depend on how
// a prompt was cut into chunks, bit for bit. See holdover/ops/delta.py for the meaning of every argument and for the
// same computation in PyTorch.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEAD_DIM 256
#define MAX_KERNEL 8

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

static void delta_head(const void *mixed, int64_t mixed_stride, const float *decay, const float *beta, const void *gate,
                       const float *conv_weight, const float *norm_weight, float eps, float *restrict state,
                       char *conv_tail, void *out, int64_t first, int64_t last, int num_heads, int head, int d,
                       int kernel, int bf16) {
    const int width = num_heads * d, all = 3 * width;
    float window[3][MAX_KERNEL][MAX_HEAD_DIM];  // the last `kernel` inputs of this head's q, k and v; a ring over time
    float weight[3][MAX_KERNEL][MAX_HEAD_DIM];
    float x[3][MAX_HEAD_DIM], memory[MAX_HEAD_DIM], y[MAX_HEAD_DIM], z[MAX_HEAD_DIM];
    for (int part = 0; part < 3; part++) {
        const int channel = part * width + head * d;
        for (int i = 0; i < kernel; i++)
            for (int c = 0; c < d; c++) weight[part][i][c] = conv_weight[(int64_t)i * all + channel + c];
        for (int i = 0; i < kernel - 1; i++)
            load_row(window[part][i], conv_tail, (int64_t)i * all + channel, d, bf16);
    }
    int newest = kernel - 1;
    const float scale = 1.0f / sqrtf((float)d);
    for (int64_t t = first; t < last; t++) {
        for (int part = 0; part < 3; part++) {
            float *restrict to = x[part];
            load_row(window[part][newest], mixed, t * mixed_stride + part * width + head * d, d, bf16);
            for (int c = 0; c < d; c++) to[c] = 0.0f;
            for (int i = 0; i < kernel; i++) {
                const float *restrict w = weight[part][i], *restrict in = window[part][(newest + 1 + i) % kernel];
                for (int c = 0; c < d; c++) to[c] = fmaf(w[c], in[c], to[c]);
            }
            for (int c = 0; c < d; c++) to[c] *= sigmoid(to[c]);
        }
        newest = (newest + 1) % kernel;
        float *restrict q = x[0], *restrict k = x[1], *restrict v = x[2];
        float q_square = 0.0f, k_square = 0.0f;
#pragma omp simd reduction(+ : q_square, k_square)
        for (int c = 0; c < d; c++) {
            q_square += q[c] * q[c];
            k_square += k[c] * k[c];
        }
        const float q_scale = scale / sqrtf(q_square + 1e-6f), k_scale = 1.0f / sqrtf(k_square + 1e-6f);
        for (int c = 0; c < d; c++) {
            q[c] *= q_scale;
            k[c] *= k_scale;
            memory[c] = 0.0f;
            y[c] = 0.0f;
        }
        const float *restrict a = decay + t * width + head * d;
        for (int i = 0; i < d; i++) {
            float *restrict row = state + (int64_t)i * d;
            const float ai = a[i], ki = k[i];
            for (int c = 0; c < d; c++) {
                row[c] *= ai;
                memory[c] = fmaf(ki, row[c], memory[c]);
            }
        }
        const float b = beta[t * num_heads + head];
        for (int c = 0; c < d; c++) memory[c] = (v[c] - memory[c]) * b;
        for (int i = 0; i < d; i++) {
            float *restrict row = state + (int64_t)i * d;
            const float qi = q[i], ki = k[i];
            for (int c = 0; c < d; c++) {
                row[c] = fmaf(ki, memory[c], row[c]);
                y[c] = fmaf(qi, row[c], y[c]);
            }
        }
        float y_square = 0.0f;
#pragma omp simd reduction(+ : y_square)
        for (int c = 0; c < d; c++) y_square += y[c] * y[c];
        const float y_scale = 1.0f / sqrtf(y_square / d + eps);
        load_row(z, gate, t * width + head * d, d, bf16);
        for (int c = 0; c < d; c++) y[c] = y[c] * y_scale * norm_weight[c] * sigmoid(z[c]);
        store_row(out, t * width + head * d, y, d, bf16);
    }
    for (int part = 0; part < 3; part++)
        for (int i = 0; i < kernel - 1; i++)
            store_row(conv_tail, (int64_t)i * all + part * width + head * d, window[part][(newest + 1 + i) % kernel], d,
                      bf16);
}

int holdover_kimi_delta(const void *mixed, int64_t mixed_stride, const float *decay, const float *beta,
                        const void *gate, const float *conv_weight, const float *norm_weight, float eps, char *live,
                        int64_t live_stride, int64_t recurrent_start, int64_t conv_start, const int64_t *live_rows,
                        const int64_t *starts, int num_sequences, int num_heads, int d, int kernel, void *out, int bf16,
                        int num_threads) {
    if (d > MAX_HEAD_DIM || kernel > MAX_KERNEL || kernel < 2) return -1;
    const int tasks = num_sequences * num_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int task = 0; task < tasks; task++) {
        const int sequence = task / num_heads, head = task % num_heads;
        char *row = live + live_rows[sequence] * live_stride;
        float *state = (float *)(row + recurrent_start) + (int64_t)head * d * d;
        delta_head(mixed, mixed_stride, decay, beta, gate, conv_weight, norm_weight, eps, state, row + conv_start, out,
                   starts[sequence], starts[sequence + 1], num_heads, head, d, kernel, bf16);
    }
    return 0;
}

// Latent attention of one new token per sequence, reading the rows where they lie. Keys are taken in blocks, with a
// running maximum (online softmax), so that memory use does not depend on the length.

#define KEY_BLOCK 32
#define MAX_ROW 1024
#define MAX_HEADS 64
#define TILE 64

static int latent_token(const void *q, const char *rows, int64_t row_stride, const int64_t *table, int64_t keys,
                        int heads, int width, int latent, float scale, void *out, int bf16) {
    // Per head: the query, the weighted sum so far, the highest score and the sum of weights.
    float *space = malloc(sizeof(float) * (size_t)(heads * (width + latent) + KEY_BLOCK * width));
    if (space == NULL) return -2;
    float *query = space, *sums = query + heads * width, *block = sums + heads * latent;
    float most[MAX_HEADS], total[MAX_HEADS], score[KEY_BLOCK];
    load_row(query, q, 0, heads * width, bf16);
    memset(sums, 0, sizeof(float) * (size_t)(heads * latent + KEY_BLOCK * width));
    for (int head = 0; head < heads; head++) {
        most[head] = -INFINITY;
        total[head] = 0.0f;
    }
    for (int64_t first = 0; first < keys; first += KEY_BLOCK) {
        const int count = keys - first < KEY_BLOCK ? (int)(keys - first) : KEY_BLOCK;
        for (int i = 0; i < count; i++)
            load_row(block + i * width, rows + table[first + i] * row_stride, 0, width, bf16);
        for (int head = 0; head < heads; head++) {
            const float *restrict mine = query + head * width;
            float *restrict sum = sums + head * latent;
            float highest = most[head];
            for (int i = 0; i < count; i += 4) {  // rows past `count` are old ones: computed, and not used
                const float *restrict row = block + i * width;
                float a = 0.0f, b = 0.0f, c = 0.0f, d = 0.0f;
#pragma omp simd reduction(+ : a, b, c, d)
                for (int j = 0; j < width; j++) {
                    a += mine[j] * row[j];
                    b += mine[j] * row[width + j];
                    c += mine[j] * row[2 * width + j];
                    d += mine[j] * row[3 * width + j];
                }
                score[i] = a * scale;
                score[i + 1] = b * scale;
                score[i + 2] = c * scale;
                score[i + 3] = d * scale;
            }
            for (int i = 0; i < count; i++) highest = score[i] > highest ? score[i] : highest;
            const float shrink = exp_single(most[head] - highest);
            most[head] = highest;
            for (int i = 0; i < count; i++) score[i] = exp_single(score[i] - highest);
            float weights = total[head] * shrink;
            for (int i = 0; i < count; i++) weights += score[i];
            total[head] = weights;
            int c = 0;
            for (; c + TILE <= latent; c += TILE) {
                float part[TILE];
                for (int j = 0; j < TILE; j++) part[j] = sum[c + j] * shrink;
                for (int i = 0; i < count; i++)
                    for (int j = 0; j < TILE; j++) part[j] = fmaf(score[i], block[i * width + c + j], part[j]);
                for (int j = 0; j < TILE; j++) sum[c + j] = part[j];
            }
            for (; c < latent; c++) {
                float part = sum[c] * shrink;
                for (int i = 0; i < count; i++) part = fmaf(score[i], block[i * width + c], part);
                sum[c] = part;
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int c = 0; c < latent; c++) sums[head * latent + c] /= total[head];
    store_row(out, 0, sums, heads * latent, bf16);
    free(space);
    return 0;
}

int holdover_latent_tokens(const void *q, const char *rows, int64_t row_stride, const int64_t *const *tables,
                           const int64_t *lengths, const int64_t *tokens, int num_sequences, int heads, int width,
                           int latent, float scale, void *out, int bf16, int num_threads) {
    if (width > MAX_ROW || latent > width || heads > MAX_HEADS) return -1;
    const int size = bf16 ? 2 : 4;
    int status = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int i = 0; i < num_sequences; i++)
        if (latent_token((const char *)q + tokens[i] * heads * width * size, rows, row_stride, tables[i], lengths[i],
                         heads, width, latent, scale, (char *)out + tokens[i] * heads * latent * size, bf16))
            status = -2;
    return status;
}
