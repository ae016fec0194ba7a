// Recurrences on the CPU for batches of unlike sequences: short convolutions, outer-product states with or without the
// delta rule (gated DeltaNet, Mamba-2), and the selective scan of Mamba-1.
//
// Each runs token by token, so that a state does not depend on how a prompt was cut into chunks, bit for bit. See
// holdover/ops/conv.py and holdover/ops/recurrence.py for the meaning of every argument and for the same in PyTorch.

#include "common.h"

#define MAX_WIDTH 512   // values of one head
#define MAX_STATE 512   // keys of one head, or states of one channel
#define CHANNELS 256    // of a convolution or scan, one task's share

int holdover_causal_conv(const void *x, int64_t x_stride, const float *weight, const float *bias, char *live,
                         int64_t live_stride, int64_t tail_start, const int64_t *live_rows, const int64_t *starts,
                         int num_sequences, int64_t channels, int kernel, int silu, float *out, int bf16,
                         int num_threads) {
    if (kernel < 2 || kernel > 16) return -1;
    const int64_t parts = (channels + CHANNELS - 1) / CHANNELS, tasks = num_sequences * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t sequence = task / parts, channel = task % parts * CHANNELS;
        const int n = channels - channel < CHANNELS ? (int)(channels - channel) : CHANNELS;
        char *tail = live + live_rows[sequence] * live_stride + tail_start;
        float window[16][CHANNELS];  // the last `kernel` inputs: a ring over time
        for (int i = 0; i < kernel - 1; i++) load_row(window[i], tail, i * channels + channel, n, bf16);
        int newest = kernel - 1;
        for (int64_t t = starts[sequence]; t < starts[sequence + 1]; t++) {
            float *restrict to = out + t * channels + channel;
            load_row(window[newest], x, t * x_stride + channel, n, bf16);
            for (int c = 0; c < n; c++) to[c] = bias == NULL ? 0.0f : bias[channel + c];
            for (int i = 0; i < kernel; i++) {
                const float *restrict w = weight + i * channels + channel, *restrict in = window[(newest + 1 + i) % kernel];
                for (int c = 0; c < n; c++) to[c] = fmaf(w[c], in[c], to[c]);
            }
            if (silu)
                for (int c = 0; c < n; c++) to[c] *= sigmoid(to[c]);
            newest = (newest + 1) % kernel;
        }
        for (int i = 0; i < kernel - 1; i++)
            store_row(tail, i * channels + channel, window[(newest + 1 + i) % kernel], n, bf16);
    }
    return 0;
}

// S <- decay S + k v^T, with the delta rule v <- beta (v - S^T k) first, if there is a beta; y = S^T q.
int holdover_outer_recurrence(const float *q, const float *k, const float *v, int64_t qk_stride, int64_t v_stride,
                              const float *decay, const float *beta, char *live, int64_t live_stride,
                              int64_t state_start, const int64_t *live_rows, const int64_t *starts, int num_sequences,
                              int key_heads, int heads, int keys, int width, float *out, int num_threads) {
    if (width > MAX_WIDTH) return -1;
    const int tasks = num_sequences * heads, sharing = heads / key_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int task = 0; task < tasks; task++) {
        const int sequence = task / heads, head = task % heads;
        float *restrict state =
            (float *)(live + live_rows[sequence] * live_stride + state_start) + (int64_t)head * keys * width;
        float now[MAX_WIDTH], y[MAX_WIDTH];
        for (int64_t t = starts[sequence]; t < starts[sequence + 1]; t++) {
            const float *restrict qt = q + t * qk_stride + head / sharing * keys;
            const float *restrict kt = k + t * qk_stride + head / sharing * keys;
            const float *restrict vt = v + t * v_stride + (int64_t)head * width;
            const float a = decay[t * heads + head];
            for (int c = 0; c < width; c++) y[c] = 0.0f;
            if (beta != NULL) {
                const float b = beta[t * heads + head];
                for (int c = 0; c < width; c++) now[c] = 0.0f;
                for (int i = 0; i < keys; i++) {
                    float *restrict row = state + (int64_t)i * width;
                    const float ki = kt[i];
                    for (int c = 0; c < width; c++) {
                        row[c] *= a;
                        now[c] = fmaf(ki, row[c], now[c]);
                    }
                }
                for (int c = 0; c < width; c++) now[c] = (vt[c] - now[c]) * b;
                for (int i = 0; i < keys; i++) {
                    float *restrict row = state + (int64_t)i * width;
                    const float qi = qt[i], ki = kt[i];
                    for (int c = 0; c < width; c++) {
                        row[c] = fmaf(ki, now[c], row[c]);
                        y[c] = fmaf(qi, row[c], y[c]);
                    }
                }
            } else {
                for (int i = 0; i < keys; i++) {
                    float *restrict row = state + (int64_t)i * width;
                    const float qi = qt[i], ki = kt[i];
                    for (int c = 0; c < width; c++) {
                        row[c] = fmaf(ki, vt[c], row[c] * a);
                        y[c] = fmaf(qi, row[c], y[c]);
                    }
                }
            }
            memcpy(out + (t * heads + head) * width, y, sizeof(float) * (size_t)width);
        }
    }
    return 0;
}

// S[c] <- exp(dt[c] A[c]) S[c] + dt[c] x[c] B; y[c] = S[c] . C. A, S: [states, channels], so that channels lie densely.
int holdover_selective_scan(const float *x, const float *dt, const float *rates, const float *b, const float *c_in,
                            char *live, int64_t live_stride, int64_t state_start, const int64_t *live_rows,
                            const int64_t *starts, int num_sequences, int64_t channels, int states, float *out,
                            int num_threads) {
    if (states > MAX_STATE) return -1;
    const int64_t parts = (channels + CHANNELS - 1) / CHANNELS, tasks = num_sequences * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t sequence = task / parts, channel = task % parts * CHANNELS;
        const int n = channels - channel < CHANNELS ? (int)(channels - channel) : CHANNELS;
        float *state = (float *)(live + live_rows[sequence] * live_stride + state_start) + channel;
        float input[CHANNELS];
        for (int64_t t = starts[sequence]; t < starts[sequence + 1]; t++) {
            const float *restrict step = dt + t * channels + channel, *restrict in = x + t * channels + channel;
            float *restrict y = out + t * channels + channel;
            for (int c = 0; c < n; c++) {
                input[c] = step[c] * in[c];
                y[c] = 0.0f;
            }
            for (int s = 0; s < states; s++) {
                float *restrict row = state + s * channels;
                const float *restrict rate = rates + s * channels + channel;
                const float bs = b[t * states + s], cs = c_in[t * states + s];
                for (int c = 0; c < n; c++) {
                    row[c] = fmaf(input[c], bs, row[c] * exp_single(step[c] * rate[c]));
                    y[c] = fmaf(cs, row[c], y[c]);
                }
            }
        }
    }
    return 0;
}
