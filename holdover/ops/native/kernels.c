// Kimi delta attention on the CPU, from the short convolution to the gated norm, for a batch of unlike sequences.
//
// One task is one head of one sequence. It runs the recurrence token by token, so that a state does not depend on how
// a prompt was cut into chunks, bit for bit. See holdover/ops/delta.py for the meaning of every argument and for the
// same computation in PyTorch.

#include "common.h"

#define MAX_HEAD_DIM 256
#define MAX_KERNEL 8

static void delta_head(const void *mixed, int64_t mixed_stride, const void *decay, const float *decay_bias,
                       const float *decay_rate, const void *beta, int64_t beta_stride, const void *gate,
                       int64_t gate_stride, const float *conv_weight, const float *norm_weight, float eps, float *restrict state,
                       char *conv_tail, void *out, int64_t first, int64_t last, int num_heads, int head, int d,
                       int kernel, int bf16) {
    const int width = num_heads * d, all = 3 * width;
    float window[3][MAX_KERNEL][MAX_HEAD_DIM];  // the last `kernel` inputs of this head's q, k and v; a ring over time
    float weight[3][MAX_KERNEL][MAX_HEAD_DIM];
    float x[3][MAX_HEAD_DIM], a[MAX_HEAD_DIM], memory[MAX_HEAD_DIM], y[MAX_HEAD_DIM], z[MAX_HEAD_DIM], b;
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
        load_row(a, decay, t * gate_stride + head * d, d, bf16);
        for (int c = 0; c < d; c++)
            a[c] = exp_single(decay_rate[head * d + c] * softplus(a[c] + decay_bias[head * d + c]));
        for (int i = 0; i < d; i++) {
            float *restrict row = state + (int64_t)i * d;
            const float ai = a[i], ki = k[i];
            for (int c = 0; c < d; c++) {
                row[c] *= ai;
                memory[c] = fmaf(ki, row[c], memory[c]);
            }
        }
        load_row(&b, beta, t * beta_stride + head, 1, bf16);
        b = sigmoid(b);
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
        load_row(z, gate, t * gate_stride + head * d, d, bf16);
        for (int c = 0; c < d; c++) y[c] = y[c] * y_scale * norm_weight[c] * sigmoid(z[c]);
        store_row(out, t * width + head * d, y, d, bf16);
    }
    for (int part = 0; part < 3; part++)
        for (int i = 0; i < kernel - 1; i++)
            store_row(conv_tail, (int64_t)i * all + part * width + head * d, window[part][(newest + 1 + i) % kernel], d,
                      bf16);
}

// decay and gate: rows gate_stride apart.
int holdover_kimi_delta(const void *mixed, int64_t mixed_stride, const void *decay, const float *decay_bias,
                        const float *decay_rate, const void *beta, int64_t beta_stride, const void *gate,
                        int64_t gate_stride, const float *conv_weight, const float *norm_weight, float eps, char *live,
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
        delta_head(mixed, mixed_stride, decay, decay_bias, decay_rate, beta, beta_stride, gate, gate_stride, conv_weight, norm_weight, eps, state, row + conv_start, out,
                   starts[sequence], starts[sequence + 1], num_heads, head, d, kernel, bf16);
    }
    return 0;
}

// Latent attention of one new token per sequence, reading the rows where they lie. Keys are taken in blocks, with a
// running maximum (online softmax), so that memory use does not depend on the length.

#define KEY_BLOCK 32
#define MAX_ROW 1024
#define MAX_HEADS 64
#define TILE 32

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

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define SPAN 64        // keys between two rescalings
#define SHARING 4      // heads that share each value read
#define MOST_PARTS 32  // of 32 numbers: rows of up to 1024

// The sums of 16 vectors as one vector: vectors are added in pairs, halves crosswise, until one is left.
static inline __m512 sums_of_16(__m512 *v) {
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 4]), _mm512_unpackhi_ps(v[i], v[i + 4]));
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 2], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 2], 0xDD));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15), sums);
}

static inline __m512 sixteen_values(const uint16_t *row) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)row);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The same for bfloat16 rows of multiples of 32 numbers: scores from pairs of numbers, without widening them first.
static int latent_token_pairs(const uint16_t *q, const char *rows, int64_t row_stride, const int64_t *table,
                              int64_t keys, int heads, int width, int latent, float scale, uint16_t *out) {
    const int parts = width / 32;
    float *sums = aligned_alloc(64, sizeof(float) * (size_t)heads * latent);
    if (sums == NULL) return -2;
    memset(sums, 0, sizeof(float) * (size_t)heads * latent);
    float most[MAX_HEADS], total[MAX_HEADS], score[MAX_HEADS][SPAN] __attribute__((aligned(64)));
    for (int head = 0; head < heads; head++) {
        most[head] = -INFINITY;
        total[head] = 0.0f;
    }
    for (int64_t first = 0; first < keys; first += SPAN) {
        const int count = keys - first < SPAN ? (int)(keys - first) : SPAN, padded = (count + 15) / 16 * 16;
        const uint16_t *row[SPAN];
        for (int i = 0; i < padded; i++)
            row[i] = (const uint16_t *)(rows + table[first + (i < count ? i : 0)] * row_stride);
        for (int i = 0; i < padded; i += 16) {
            for (int j = 0; j < 16; j++) {
                const int64_t later = first + SPAN + i + j;  // rows lie anywhere: ask for the next span's in time
                if (later < keys)
                    for (int line = 0; line < 2 * width; line += 64)
                        _mm_prefetch(rows + table[later] * row_stride + line, _MM_HINT_T0);
            }
            for (int head = 0; head < heads; head++) {
                __m512bh query[MOST_PARTS];
                for (int part = 0; part < parts; part++)
                    query[part] = (__m512bh)_mm512_loadu_si512(q + head * width + part * 32);
                __m512 dot[16];
                for (int j = 0; j < 16; j++) dot[j] = _mm512_setzero_ps();
                for (int part = 0; part < parts; part++)
                    for (int j = 0; j < 16; j++)
                        dot[j] = _mm512_dpbf16_ps(dot[j], query[part],
                                                  (__m512bh)_mm512_loadu_si512(row[i + j] + part * 32));
                _mm512_store_ps(score[head] + i, _mm512_mul_ps(sums_of_16(dot), _mm512_set1_ps(scale)));
            }
        }
        for (int head = 0; head < heads; head++) {
            float highest = most[head], weights = 0.0f, *own = score[head];
            for (int i = count; i < padded; i++) own[i] = -INFINITY;
#pragma omp simd reduction(max : highest)
            for (int i = 0; i < padded; i++) highest = own[i] > highest ? own[i] : highest;
            const float shrink = exp_single(most[head] - highest);
#pragma omp simd reduction(+ : weights)
            for (int i = 0; i < padded; i++) {
                own[i] = exp_single(own[i] - highest);
                weights += own[i];
            }
            for (int i = count; i < padded; i++) weights -= own[i];
            total[head] = total[head] * shrink + weights;
            most[head] = highest;
            if (shrink != 1.0f)
                for (int c = 0; c < latent; c++) sums[head * latent + c] *= shrink;
        }
        for (int column = 0; column < latent; column += 32) {
            int head = 0;
            for (; head + SHARING <= heads; head += SHARING) {
                __m512 sum[SHARING][2];
                for (int h = 0; h < SHARING; h++)
                    for (int c = 0; c < 2; c++) sum[h][c] = _mm512_load_ps(sums + (head + h) * latent + column + 16 * c);
                for (int i = 0; i < count; i++) {
                    const __m512 a = sixteen_values(row[i] + column), b = sixteen_values(row[i] + column + 16);
                    for (int h = 0; h < SHARING; h++) {
                        const __m512 weight = _mm512_set1_ps(score[head + h][i]);
                        sum[h][0] = _mm512_fmadd_ps(weight, a, sum[h][0]);
                        sum[h][1] = _mm512_fmadd_ps(weight, b, sum[h][1]);
                    }
                }
                for (int h = 0; h < SHARING; h++)
                    for (int c = 0; c < 2; c++) _mm512_store_ps(sums + (head + h) * latent + column + 16 * c, sum[h][c]);
            }
            for (; head < heads; head++) {
                __m512 a = _mm512_load_ps(sums + head * latent + column);
                __m512 b = _mm512_load_ps(sums + head * latent + column + 16);
                for (int i = 0; i < count; i++) {
                    const __m512 weight = _mm512_set1_ps(score[head][i]);
                    a = _mm512_fmadd_ps(weight, sixteen_values(row[i] + column), a);
                    b = _mm512_fmadd_ps(weight, sixteen_values(row[i] + column + 16), b);
                }
                _mm512_store_ps(sums + head * latent + column, a);
                _mm512_store_ps(sums + head * latent + column + 16, b);
            }
        }
    }
    for (int head = 0; head < heads; head++)
        for (int c = 0; c < latent; c++) sums[head * latent + c] /= total[head];
    store_row(out, 0, sums, heads * latent, 1);
    free(sums);
    return 0;
}
#endif

int holdover_latent_tokens(const void *q, const char *rows, int64_t row_stride, const int64_t *const *tables,
                           const int64_t *lengths, const int64_t *tokens, int num_sequences, int heads, int width,
                           int latent, float scale, void *out, int bf16, int num_threads) {
    if (width > MAX_ROW || latent > width || heads > MAX_HEADS) return -1;
    const int size = bf16 ? 2 : 4;
    int status = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int i = 0; i < num_sequences; i++) {
#if defined(__AVX512BF16__)
        if (bf16 && width % 32 == 0 && latent % 32 == 0) {
            if (latent_token_pairs((const uint16_t *)q + tokens[i] * heads * width, rows, row_stride, tables[i],
                                   lengths[i], heads, width, latent, scale,
                                   (uint16_t *)out + tokens[i] * heads * latent))
                status = -2;
            continue;
        }
#endif
        if (latent_token((const char *)q + tokens[i] * heads * width * size, rows, row_stride, tables[i], lengths[i],
                         heads, width, latent, scale, (char *)out + tokens[i] * heads * latent * size, bf16))
            status = -2;
    }
    return status;
}

// Small steps between matrix products, each one pass over its rows.

// out = rms_norm(x). With `delta`, x becomes x + delta first.
int holdover_rms_norm(void *x, const void *delta, const float *weight, float eps, void *out, int64_t rows, int dim,
                      int bf16, int num_threads) {
    if (dim > 16384) return -1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        float y[dim], more[dim];
        load_row(y, x, row * dim, dim, bf16);
        if (delta != NULL) {
            load_row(more, delta, row * dim, dim, bf16);
            for (int c = 0; c < dim; c++) y[c] += more[c];
            store_row(x, row * dim, y, dim, bf16);
            load_row(y, x, row * dim, dim, bf16);  // as rounded
        }
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int c = 0; c < dim; c++) square += y[c] * y[c];
        const float scale = 1.0f / sqrtf(square / dim + eps);
        for (int c = 0; c < dim; c++) y[c] *= scale * weight[c];
        store_row(out, row * dim, y, dim, bf16);
    }
    return 0;
}

// Scores of experts by a sigmoid, the best top_k chosen with `bias` on top; see route_sigmoid in ops/experts.py.
int holdover_route(const void *x, const float *router, const float *bias, float *weights, int64_t *experts,
                   int64_t tokens, int dim, int num_experts, int top_k, int renormalize, float scaling, int bf16,
                   int num_threads) {
    if (dim > 16384 || num_experts > 4096 || top_k > num_experts) return -1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        float row[dim], score[num_experts], choice[num_experts], sum = 0.0f;
        load_row(row, x, t * dim, dim, bf16);
        for (int e = 0; e < num_experts; e++) {
            const float *restrict w = router + (int64_t)e * dim;
            float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int c = 0; c < dim; c++) dot = fmaf(w[c], row[c], dot);
            score[e] = sigmoid(dot);
            choice[e] = score[e] + bias[e];
        }
        for (int i = 0; i < top_k; i++) {
            int best = 0;
            for (int e = 1; e < num_experts; e++) best = choice[e] > choice[best] ? e : best;
            choice[best] = -INFINITY;
            experts[t * top_k + i] = best;
            weights[t * top_k + i] = score[best];
            sum += score[best];
        }
        for (int i = 0; i < top_k; i++) weights[t * top_k + i] *= renormalize ? scaling / (sum + 1e-20f) : scaling;
    }
    return 0;
}

int holdover_gated_silu(const void *inner, void *out, int64_t rows, int dim, int bf16, int num_threads) {
    if (dim > 65536) return -1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        float gate[256], up[256];
        for (int c = 0; c < dim; c += 256) {
            const int n = dim - c < 256 ? dim - c : 256;
            load_row(gate, inner, row * 2 * dim + c, n, bf16);
            load_row(up, inner, row * 2 * dim + dim + c, n, bf16);
            for (int i = 0; i < n; i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
            store_row(out, row * dim + c, gate, n, bf16);
        }
    }
    return 0;
}

// Sorts tokens by expert. Row `starts[e] + i` of `rows` is the i-th token that chose expert e; what is left of the
// expert's room is zero. `place[choice]` is the row of each choice.
int holdover_dispatch(const void *x, const int64_t *experts, const int64_t *starts, void *rows, int64_t *place,
                      int64_t tokens, int top_k, int num_experts, int64_t row_bytes, int num_threads) {
    if (num_experts > 4096) return -1;
    int64_t next[num_experts];
    for (int e = 0; e < num_experts; e++) next[e] = starts[e];
    for (int64_t i = 0; i < tokens * top_k; i++) place[i] = next[experts[i]]++;
    for (int e = 0; e < num_experts; e++)
        memset((char *)rows + next[e] * row_bytes, 0, (starts[e + 1] - next[e]) * row_bytes);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < tokens * top_k; i++)
        memcpy((char *)rows + place[i] * row_bytes, (const char *)x + (i / top_k) * row_bytes, row_bytes);
    return 0;
}

int holdover_combine(const void *rows, const int64_t *place, const float *weights, const void *shared, void *out,
                     int64_t tokens, int top_k, int dim, int bf16, int num_threads) {
    if (dim > 16384) return -1;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        float sum[dim], row[dim];
        load_row(sum, shared, t * dim, dim, bf16);
        for (int k = 0; k < top_k; k++) {
            const float w = weights[t * top_k + k];
            load_row(row, rows, place[t * top_k + k] * dim, dim, bf16);
            for (int c = 0; c < dim; c++) sum[c] = fmaf(w, row[c], sum[c]);
        }
        store_row(out, t * dim, sum, dim, bf16);
    }
    return 0;
}
