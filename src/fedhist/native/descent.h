/* One step of a local optimizer, as torch.optim takes it. */
#pragma once
#include "layers.h"

/* Summed in double from time to time: a float has too few digits for millions of parameters. */
static double squared_norm(const float *values, int64_t count) {
    double total = 0;
    int64_t i = 0;
    while (i + LANES <= count) {
        lanes sum = splat(0);
        for (int n = 0; n < 256 && i + LANES <= count; n++, i += LANES) {
            lanes value = *(const lanes *)(values + i);
            sum += value * value;
        }
        total += sum_of_lanes(sum);
    }
    for (; i < count; i++) total += values[i] * values[i];
    return total;
}

/* Complete the gradient of the objective with its other terms, and clip it as torch.nn.utils.clip_grad_norm_ does. */
static void complete(int64_t size, const Descent *descent, const float *restrict received,
                     const float *restrict shift, const Space *space) {
    float *restrict local = space->local, *restrict gradient = space->gradient, mu = (float)descent->mu;
    for (int64_t i = 0; i < size; i++) gradient[i] += mu * (local[i] - received[i]);
    for (int64_t i = 0; shift && i < size; i++) gradient[i] += shift[i];
    if (descent->clip_norm <= 0) return;
    double ratio = descent->clip_norm / (sqrt(squared_norm(gradient, size)) + 1e-6);
    if (!(ratio >= 1)) /* NaN goes through */
        for (int64_t i = 0; i < size; i++) gradient[i] *= (float)ratio;
}

/* Velocity is the first moment. Adam decays the gradient, AdamW the parameters. */
static void adam(int64_t size, const Descent *descent, int64_t step, float mu, const float *restrict received,
                 const Space *space) {
    float *restrict local = space->local, *restrict gradient = space->gradient;
    float *restrict mean = space->velocity, *restrict squares = space->squares;
    double beta1 = descent->beta1, beta2 = descent->beta2, decay = descent->weight_decay;
    float keep = (float)(descent->adam == ADAMW ? 1 - descent->lr * decay : 1);
    float pull = (float)(descent->adam == ADAM ? decay : 0), eps = (float)descent->eps;
    float lr = (float)(descent->lr / (1 - pow(beta1, (double)step + 1)));
    float root = (float)(1 / sqrt(1 - pow(beta2, (double)step + 1)));
    float fresh = (float)(1 - beta1), old = (float)beta2, square = (float)(1 - beta2);
    for (int64_t i = 0; i < size; i++) {
        float slope = gradient[i] + mu * (local[i] - received[i]) + pull * local[i];
        mean[i] += fresh * (slope - mean[i]);
        squares[i] = old * squares[i] + square * slope * slope;
        local[i] = keep * local[i] - lr * mean[i] / (sqrtf(squares[i]) * root + eps);
    }
}

static void sgd(int64_t size, const Descent *descent, float mu, const float *restrict received, const Space *space) {
    float *restrict local = space->local, *restrict gradient = space->gradient, *restrict velocity = space->velocity;
    float lr = (float)descent->lr, momentum = (float)descent->momentum, decay = (float)descent->weight_decay;
    if (descent->nesterov)
        for (int64_t i = 0; i < size; i++) {
            float slope = gradient[i] + mu * (local[i] - received[i]) + decay * local[i];
            velocity[i] = momentum * velocity[i] + slope;
            local[i] -= lr * (slope + momentum * velocity[i]);
        }
    else
        for (int64_t i = 0; i < size; i++) {
            float slope = gradient[i] + mu * (local[i] - received[i]) + decay * local[i];
            velocity[i] = momentum * velocity[i] + slope;
            local[i] -= lr * velocity[i];
        }
}

/* Take a step. `shift` is a linear term's gradient, or NULL. */
static void descend(int64_t size, const Descent *descent, int64_t step, const float *received, const float *shift,
                    const Space *space) {
    bool apart = shift || descent->clip_norm > 0; /* else one pass over the parameters does it all */
    float mu = apart ? 0 : (float)descent->mu;
    if (apart) complete(size, descent, received, shift, space);
    if (descent->adam != SGD) adam(size, descent, step, mu, received, space);
    else sgd(size, descent, mu, received, space);
    /* The next backward pass leaves alone what belongs to parameters that no layer uses. */
    if (apart) memset(space->gradient, 0, sizeof(float) * (size_t)size);
}
