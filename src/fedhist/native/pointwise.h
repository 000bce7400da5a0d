/* Pooling, sums and activations, row by row. */
#pragma once
#include "layers.h"

/* Pool windows of `in` into row `y` of `out`; or, given that row's gradient, add it to that of `in`. A window's
 * gradient goes to its first maximum, as in PyTorch. Where ReLU has since changed the maximum, it is zero anyway. */
static void pool(const Layer *layer, int y, bool back, Image in, Image out, Image in_slope, Image out_slope,
                 int vectors) {
    int width = vectors * LANES, taps = layer->kernel_height * layer->kernel_width;
    float share = 1 / (float)taps;
    for (int channel = 0; channel < layer->channels; channel++)
        for (int x = 0; x < layer->out_width; x++) {
            ptrdiff_t corner = channel * in.plane + y * layer->stride_height * in.row
                               + (ptrdiff_t)x * layer->stride_width * vectors;
            ptrdiff_t pixel = channel * out.plane + y * out.row + (ptrdiff_t)x * vectors;
            float *restrict pooled = (float *)(out.at + pixel);
            float *restrict slope = (float *)(out_slope.at + pixel);
            for (int tap = 0; tap < taps; tap++) {
                ptrdiff_t place = corner + tap / layer->kernel_width * in.row
                                  + (ptrdiff_t)(tap % layer->kernel_width) * vectors;
                const float *restrict value = (const float *)(in.at + place);
                float *restrict target = (float *)(in_slope.at + place);
                if (layer->kind == AVERAGE_POOL && back)
                    for (int i = 0; i < width; i++) target[i] += slope[i] * share;
                else if (layer->kind == AVERAGE_POOL)
                    for (int i = 0; i < width; i++) pooled[i] = (tap ? pooled[i] : 0) + value[i] * share;
                else if (back)
                    for (int i = 0; i < width; i++) {
                        bool first = value[i] == pooled[i];
                        target[i] += first ? slope[i] : 0;
                        slope[i] = first ? 0 : slope[i];
                    }
                else
                    for (int i = 0; i < width; i++)
                        pooled[i] = !tap || value[i] > pooled[i] || value[i] != value[i] ? value[i] : pooled[i];
            }
        }
}

/* Apply an activation to values, or its derivative to their gradient. Comparisons are such that NaN goes through. */
static void activate_run(int activation, bool back, float *restrict value, float *restrict change, int run) {
    if (activation == RELU && !back)
        for (int i = 0; i < run; i++) value[i] = value[i] <= 0 ? 0 : value[i];
    else if (activation == RELU)
        for (int i = 0; i < run; i++) change[i] = value[i] <= 0 ? 0 : change[i];
    else if (activation == TANH && !back)
        for (int i = 0; i < run; i++) value[i] = tanhf(value[i]);
    else if (activation == TANH)
        for (int i = 0; i < run; i++) change[i] *= 1 - value[i] * value[i];
}

/* The same for row `y` of a layer's output. */
static void activate(const Layer *layer, int y, bool back, Image out, Image slope, int vectors) {
    for (int channel = 0; layer->activation != IDENTITY && channel < layer->out_channels; channel++) {
        ptrdiff_t row = channel * out.plane + y * out.row;
        activate_run(layer->activation, back, (float *)(out.at + row), (float *)(slope.at + row),
                     layer->out_width * vectors * LANES);
    }
}

/* Row `y` of the sum of two values, or with one of them alone. */
static void add_row(const Layer *layer, int y, Image one, Image other, Image out, int vectors) {
    int run = layer->width * vectors * LANES;
    for (int channel = 0; channel < layer->channels; channel++) {
        const float *restrict a = (const float *)(one.at + channel * one.plane + y * one.row);
        float *restrict target = (float *)(out.at + channel * out.plane + y * out.row);
        if (other.at) {
            const float *restrict b = (const float *)(other.at + channel * other.plane + y * other.row);
            for (int i = 0; i < run; i++) target[i] = a[i] + b[i];
        } else memcpy(target, a, sizeof(float) * (size_t)run);
        activate_run(layer->activation, false, target, NULL, run);
    }
}

/* Row `y` of its gradient with respect to one of them. */
static void add_row_back(const Layer *layer, int y, bool add, Image out_slope, Image in_slope, int vectors) {
    int run = layer->width * vectors * LANES;
    for (int channel = 0; channel < layer->channels; channel++) {
        const float *restrict slope = (const float *)(out_slope.at + channel * out_slope.plane + y * out_slope.row);
        float *restrict target = (float *)(in_slope.at + channel * in_slope.plane + y * in_slope.row);
        if (add)
            for (int i = 0; i < run; i++) target[i] += slope[i];
        else memcpy(target, slope, sizeof(float) * (size_t)run);
    }
}

/* e^x to some 2e-7 of it, without branches, so that compilers find the vectors; between e^-87 and e^87. */
INLINE float exponential(float x) {
    x = x < -87 ? -87 : x > 87 ? 87 : x;
    float whole = x * 1.44269504f + 12582912; /* 1.5·2^23, which rounds to whole numbers */
    union { float f; int32_t i; } power = {whole};
    whole -= 12582912;
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f; /* Cephes' polynomial */
    sum = sum * x + 1.3981999507e-3f;
    sum = sum * x + 8.3334519073e-3f;
    sum = sum * x + 4.1665795894e-2f;
    sum = sum * x + 1.6666665459e-1f;
    sum = sum * x + 5.0000001201e-1f;
    power.i = (int32_t)(((uint32_t)power.i - 0x4B400000u + 127u) << 23);
    return (sum * x * x + x + 1) * power.f;
}

/* Φ(x) of a normal distribution, by Abramowitz and Stegun's 7.1.26 to 1e-7, given e^(-x²/2). */
INLINE float normal(float x, float density) {
    float t = 1 / (1 + 0.231641888f * (x < 0 ? -x : x));
    float tail = ((((0.5307027145f * t - 0.7265760135f) * t + 0.7107068705f) * t - 0.1422483685f) * t + 0.127414796f) * t;
    return x < 0 ? tail * density : 1 - tail * density;
}

/* GELU (Hendrycks and Gimpel, 2016) of row `y`, x·Φ(x), or with its derivative Φ(x) + x·φ(x) the gradient of it;
 * Φ may be approximated by a logistic function, σ(2u) = (1 + tanh u) / 2. */
static void gelu(const Layer *layer, int y, bool back, bool add, Image in, Image from, Image to, int vectors) {
    int run = layer->width * vectors * LANES;
    bool exact = layer->kind == GELU;
    for (int channel = 0; channel < layer->channels; channel++) {
        const float *restrict value = (const float *)(in.at + channel * in.plane + y * in.row);
        const float *slope = (const float *)(from.at + channel * from.plane + y * from.row);
        float *restrict target = (float *)(to.at + channel * to.plane + y * to.row);
        for (int i = 0; i < run; i++) {
            float x = value[i], share, density;
            if (exact) {
                float bell = exponential(-x * x / 2);
                share = normal(x, bell);
                density = 0.39894228f * bell;
            } else {
                share = 1 / (1 + exponential(-1.59576912f * x * (1 + 0.044715f * x * x)));
                density = 1.59576912f * (1 + 0.134145f * x * x) * share * (1 - share);
            }
            float change = back ? slope[i] * (share + x * density) : x * share;
            target[i] = add ? target[i] + change : change;
        }
    }
}
