// What stands between the matrices. Sizes of the last axis are multiples of LANES.
#include "vector.h"

// hidden += delta (unless NULL); out = hidden / rms(hidden) * weight.
EXPORT void tm_add_rms_norm(float *hidden, const float *delta, const float *weight, float eps, int rows, int size,
                            float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 64)
    for (int row = 0; row < rows; row++) {
        float *h = hidden + (size_t)row * size;
        vf squares[2] = {{0}, {0}};
        for (int i = 0; i < size; i += LANES) {
            vf v = load(h + i);
            if (delta) store(h + i, v += load(delta + (size_t)row * size + i));
            squares[i / LANES & 1] += v * v;
        }
        float scale = 1.0f / sqrtf(sum_lanes(squares[0] + squares[1]) / size + eps);
        for (int i = 0; i < size; i += LANES) store(out + (size_t)row * size + i, load(h + i) * scale * load(weight + i));
    }
}

// x [rows, stride]: the first `heads` heads of `dim` values of each row are rotated in place; cos and sin [rows, dim].
EXPORT void tm_rotate(float *x, int stride, const float *cos, const float *sin, int rows, int heads, int dim,
                      int threads) {
    int half = dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 64)
    for (int row = 0; row < rows; row++) {
        const float *c = cos + (size_t)row * dim, *s = sin + (size_t)row * dim;
        for (int head = 0; head < heads; head++) {
            float *a = x + (size_t)row * stride + head * dim, *b = a + half;
            for (int i = 0; i < half; i++) {
                float first = a[i], second = b[i];
                a[i] = first * c[i] - second * s[i];
                b[i] = second * c[half + i] + first * s[half + i];
            }
        }
    }
}

// x [rows, 2 * size] -> out [rows, size] = silu(x[:size]) * x[size:].
EXPORT void tm_silu_mul(const float *x, int rows, int size, float *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 16)
    for (int row = 0; row < rows; row++) {
        const float *gate = x + (size_t)row * 2 * size, *up = gate + size;
        for (int i = 0; i < size; i += LANES) {
            vf g = load(gate + i);
            store(out + (size_t)row * size + i, g / (1.0f + vexp(-g)) * load(up + i));
        }
    }
}
