// One call of tidemill.v1.InferenceService: node client.js ADDRESS PROTO_FOLDER METHOD, the request as JSON on stdin.
// Prints each response as a line of JSON, then a line {status, details, error}.
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const [address, protoFolder, method] = process.argv.slice(2);
const files = ["tidemill/v1/inference.proto", "tidemill/v1/errors.proto"];
const options = { includeDirs: [protoFolder], keepCase: true, longs: String, enums: String, oneofs: true };
const contract = grpc.loadPackageDefinition(loader.loadSync(files, options)).tidemill.v1;
const errors = new protobuf.Root().loadSync(path.join(protoFolder, files[1]), { keepCase: true });
const rpc = protobuf.parse(`
  syntax = "proto3"; package google.rpc;
  message Detail { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Detail details = 3; }
`, { keepCase: true }).root;

function errorOf(metadata) {
  const [packed] = metadata.get("grpc-status-details-bin");
  if (packed === undefined) return null;
  const { details } = rpc.lookupType("google.rpc.Status").decode(packed);
  const found = details.find((detail) => detail.type_url.endsWith("/tidemill.v1.ErrorDetail"));
  if (found === undefined) return null;
  const type = errors.lookupType("tidemill.v1.ErrorDetail");
  return type.toObject(type.decode(found.value), { enums: String, defaults: true });
}

function print(value) {
  process.stdout.write(JSON.stringify(value) + "\n");
}

async function main() {
  const chunks = [];
  for await (const chunk of process.stdin) chunks.push(chunk);
  const request = JSON.parse(Buffer.concat(chunks).toString());
  const client = new contract.InferenceService(address, grpc.credentials.createInsecure());
  const deadline = Date.now() + 60_000;
  const end = (status) => {
    print({ status: status.code, details: status.details, error: errorOf(status.metadata) });
    client.close();
  };
  if (method === "Generate") {
    const call = client.Generate(request, { deadline });
    call.on("data", print);
    call.on("error", () => {});  // The status event, which follows, says the same.
    call.on("status", end);
    return;
  }
  client[method](request, { deadline }, (error, response) => {
    if (!error) print(response);
    end(error ?? { code: grpc.status.OK, details: "", metadata: new grpc.Metadata() });
  });
}

main();
