#!/bin/sh
# Regenerates the certificates in this folder with OpenSSL 3: sh make.sh
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
touch "$work/index"
cat >"$work/ca.cnf" <<END
[ca]
default_ca = tests
[tests]
database = $work/index
new_certs_dir = $work
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[authority]
basicConstraints = critical, CA:TRUE
subjectKeyIdentifier = hash
[worker]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:localhost, IP:127.0.0.1, IP:::1
END

key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1"; }

# sign NAME KEY UNTIL EXTENSIONS ARGUMENTS...: a certificate that is valid from the year 2000 on
sign() {
    name=$1 key=$2 until=$3 extensions=$4
    shift 4
    openssl req -new -key "$key" -subj "/CN=test $name" -out "$work/request"
    openssl ca -batch -notext -config "$work/ca.cnf" -in "$work/request" -out "$name.pem" \
        -startdate 20000101000000Z -enddate "$until" -extensions "$extensions" "$@"
}

for pair in authority:worker other-authority:untrusted; do
    authority=${pair%:*} worker=${pair#*:}
    key "$work/$authority.key"
    key "$worker.key"
    sign "$authority" "$work/$authority.key" 21260101000000Z authority -selfsign -keyfile "$work/$authority.key"
    sign "$worker" "$worker.key" 21260101000000Z worker -cert "$authority.pem" -keyfile "$work/$authority.key"
done
sign expired worker.key 20000102000000Z worker -cert authority.pem -keyfile "$work/authority.key"
openssl pkey -in worker.key -aes256 -passout pass:secret -out locked.key
chmod 644 ./*.key
rm -r "$work"
