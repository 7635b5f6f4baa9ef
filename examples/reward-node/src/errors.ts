import { status } from "@grpc/grpc-js";

/** A call that cannot be answered at all; its message says what to change. */
export class CallError extends Error {
  readonly code: status;

  constructor(code: status, message: string) {
    super(message);
    this.code = code;
  }
}

/** INVALID_ARGUMENT: the request itself must change. */
export const invalid = (message: string): CallError => new CallError(status.INVALID_ARGUMENT, message);

/** One picture that cannot be scored: the error of its sample, while the others get their scores. */
export class PictureError extends Error {}
